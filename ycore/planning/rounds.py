"""Seconds of a round with a judge, by the simulator: the live run's own decisions in virtual time.

An engine's step is taken as a base and more for each request, from the two ends of what `timing` says of it; reading a
prompt counts as the tokens that could be written meanwhile.

Not here: rounds without a judge, where there is nothing to decide (`timing`), and the simulation (`simulate`).
"""

from collections.abc import Mapping

from ycore.placement.hall import Hall
from ycore.placement.load import Speed
from ycore.placement.placement import JUDGE, ROLLOUT
from ycore.placement.words import Wanted
from ycore.planning import timing
from ycore.planning.devices import Device
from ycore.planning.facts import ModelFacts
from ycore.planning.job import Job, Way
from ycore.simulate.compare import simulate
from ycore.simulate.round import Demand, Machine
from ycore.simulate.workload import Assumed, Lengths

_SIGMA = 0.5
_ROUNDS, _WARM_UP = 1, 1
_APART = 10**6  # places of the order between one round and the next: each placement sees the same prompts


def round_s(job: Job, way: Way, device: Device, *, at_once: Mapping[str, int]) -> float:
    """Mean seconds of a round of this placement.

    Args:
        at_once: requests that an engine of each role can hold.
    """
    assert job.judge is not None
    wide = way.tensor_parallel
    writing = _speed(job.policy, job, device, context=job.prompt_tokens, most=at_once[ROLLOUT], wide=wide)
    reads = job.judge_prompt_tokens + job.completion_tokens
    judging = _speed(job.judge, job, device, context=reads, most=at_once[JUDGE], wide=wide)
    read_s = timing.prefill_s(job.judge, job, device, tokens=reads, tensor_parallel=wide)
    verdict = job.judge_tokens + read_s / judging.step_s(1)
    spread = _SIGMA if job.completion_tokens < job.max_tokens else 0.0
    work = Assumed(
        Lengths(float(job.completion_tokens), spread, float(job.max_tokens)),
        {JUDGE: max(1.0, verdict)},
        job.group_size,
        1 / job.draws,
    )
    exclusive = way.sleeps and not device.on_cpu
    swap = timing.swap_s(job.policy, job, device) if exclusive else 0.0
    hall = Hall(way.slots, (ROLLOUT, JUDGE), dict(at_once), exclusive=exclusive, first_swap_s=swap)
    result = simulate(
        _wanted(way),
        hall,
        Machine({ROLLOUT: writing, JUDGE: judging}, {ROLLOUT: swap, JUDGE: swap}),
        lambda number: work.group_at,
        Demand(job.prompts_per_step, dynamic=job.draws > 1.0),
        num_rounds=_ROUNDS,
        warm_up=_WARM_UP,
        position_of=lambda number: number * _APART,
    )
    return result.seconds


def _wanted(way: Way) -> Wanted:
    if way.kind == "split":
        return Wanted("split", (way.slots - way.judge_slots, way.judge_slots))
    return Wanted(way.kind)


def _speed(facts: ModelFacts, job: Job, device: Device, *, context: int, most: int, wide: int) -> Speed:
    """The line through a step with one request and one with as many as fit."""

    def step(sequences: float) -> float:
        return timing.decode_step_s(facts, job, device, sequences=sequences, context=context, tensor_parallel=wide)

    full = max(2, most)
    each = max(1e-9, (step(full) - step(1)) / (full - 1))
    return Speed(max(1e-9, step(1) - each), each)
