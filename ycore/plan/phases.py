"""Which roles are in a device's memory together, phase by phase, and the seconds of each phase: a way's forecast.

The phases are those of a step: training, the sync of weights with the engines waking up, generating, judging. On GPUs
what must fit is the largest phase of one device. On a CPU the roles are processes that never sleep and share one
memory, so what must fit is the sum of their peaks.

Seconds of a round with a judge, by the simulator: the live run's own decisions in virtual time.

Not here: the bytes of a role (`memory`), the seconds of a phase alone (`timing`), which ways there are (`search`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ycore.placement.load import Speed
from ycore.placement.placement import JUDGE, ROLLOUT, Placement, SlotPool
from ycore.plan import memory, timing
from ycore.plan.comparison import simulate
from ycore.plan.devices import GIB, Device, Fleet
from ycore.plan.job import Job, Way
from ycore.plan.model_facts import ModelFacts
from ycore.plan.simulation import Assumed, Demand, Lengths, Machine

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
    pool = SlotPool(way.slots, (ROLLOUT, JUDGE), dict(at_once), exclusive=exclusive, swap_s=swap)
    result = simulate(
        _wanted(way),
        pool,
        Machine({ROLLOUT: writing, JUDGE: judging}, {ROLLOUT: swap, JUDGE: swap}),
        lambda number: work.group_at,
        Demand(job.prompts_per_step, dynamic=job.draws > 1.0),
        num_rounds=_ROUNDS,
        warm_up=_WARM_UP,
        position_of=lambda number: number * _APART,
    )
    return result.seconds


def _wanted(way: Way) -> Placement:
    if way.kind == "split":
        return Placement("split", (way.slots - way.judge_slots, way.judge_slots))
    return Placement(way.kind)


def _speed(facts: ModelFacts, job: Job, device: Device, *, context: int, most: int, wide: int) -> Speed:
    """The line through a step with one request and one with as many as fit."""

    def step(sequences: float) -> float:
        return timing.decode_step_s(facts, job, device, sequences=sequences, context=context, tensor_parallel=wide)

    full = max(2, most)
    each = max(1e-9, (step(full) - step(1)) / (full - 1))
    return Speed(max(1e-9, step(1) - each), each)


Roles = Mapping[str, float]
"""Bytes by role, on one device or, on a CPU, of one process."""

_MOST_SEQUENCES = 256
_CPU_KV_STEP = GIB  # vLLM takes whole GiB there
_DEVICE_SHARE = 0.95
"""Of a device's memory, what a plan may use."""

_HOST_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Engine:
    """One role's engine on one device."""

    weights: float
    kv_cache: float
    workspace: float
    footing: float
    at_once: int
    """Sequences whose keys and values fit together."""

    @property
    def awake(self) -> float:
        return self.weights + self.kv_cache + self.workspace + self.footing


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one way of running a job is expected to take."""

    way: Way
    trainer: Mapping[str, float]
    """Bytes of one rank's trainer at its peak, by what they are for."""

    engines: Mapping[str, Engine]
    phases: Mapping[str, Roles]
    """Bytes by phase and role, on the device that has most in it."""

    capacity: float
    """Bytes that a plan may use of a device, or of the machine for a CPU."""

    seconds: Mapping[str, float]
    """Of `sync`, `generate`, `judge`, `round`, `train`, `step`."""

    tokens_per_step: float
    """Of the completions that are trained on."""

    @property
    def peak(self) -> tuple[str, float]:
        """The fullest phase and its bytes."""
        phase = max(self.phases, key=lambda name: sum(self.phases[name].values()))
        return phase, sum(self.phases[phase].values())

    @property
    def fits(self) -> bool:
        return self.peak[1] <= self.capacity and all(engine.at_once >= 1 for engine in self.engines.values())

    @property
    def step_s(self) -> float:
        return self.seconds["step"]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.step_s


def forecast(job: Job, way: Way, fleet: Fleet) -> Forecast:
    """Memory and time of one way; it need not fit."""
    states, parts = memory.trainer_states(job, way), memory.trainer_peak(job, way)
    footing = memory.footing_of(fleet.device)
    rest = footing.slack * sum(parts.values())
    libraries = footing.trainer + (footing.zero if way.sharding.startswith("zero") else 0.0)
    trainer = {**parts, "allocator": rest, "libraries": libraries}
    resident = sum(states.values()) - states.get("gradients", 0.0) - states.get("copies", 0.0) + libraries
    capacity = _capacity(fleet)
    syncing = resident + memory.largest_weight(job.policy)
    others = footing.asleep * (0 if way.kind == "split" or job.judge is None else 1)
    engines = _engines(job, way, fleet, beside=syncing + others if way.sleeps else sum(trainer.values()))
    if fleet.device.on_cpu:
        peak = max(sum(trainer.values()), syncing + min(memory.SYNC_FILE_BYTES, _policy_bytes(job)))
        phases: Mapping[str, Roles] = {"all at once": _processes(way, peak, engines)}
    else:
        phases = _on_device(way, footing, engines, trainer=sum(trainer.values()), resident=resident, syncing=syncing)
    seconds, tokens = _seconds(job, way, fleet, engines), float(job.completions * job.completion_tokens)
    return Forecast(way, trainer, engines, phases, capacity, seconds, tokens)


def simulated(job: Job, one: Forecast, fleet: Fleet) -> Forecast:
    """The same, with the round of a judged run as the simulator plays it."""
    at_once = {role: max(1, engine.at_once) for role, engine in one.engines.items()}
    taken = round_s(job, one.way, fleet.device, at_once=at_once)
    step = one.seconds["sync"] + taken + one.seconds["train"]
    kept = {name: value for name, value in one.seconds.items() if name != "swaps"}
    return replace(one, seconds={**kept, "round": taken, "step": step})


def _policy_bytes(job: Job) -> float:
    return float(job.policy.num_params * job.bytes_per_value)


def _capacity(fleet: Fleet) -> float:
    return fleet.device.memory_bytes * (_HOST_SHARE if fleet.device.on_cpu else _DEVICE_SHARE)


def _engines(job: Job, way: Way, fleet: Fleet, *, beside: float) -> Mapping[str, Engine]:
    """The engines of one slot, each with as much cache as the round can use, or as is left beside the trainer."""
    judge_slots = way.judge_slots if way.kind == "split" else way.slots
    needs = {"rollout": (job.policy, way.slots - way.judge_slots, job.prompt_tokens + job.max_tokens)}
    if job.judge is not None:
        longest = job.judge_prompt_tokens + job.max_tokens + job.judge_tokens
        needs["judge"] = (job.judge, judge_slots, longest)
    shares = 1 if way.sleeps or way.kind == "split" else len(needs)
    room = (_capacity(fleet) - beside) / shares
    return {
        role: _engine(job, facts, way, fleet, slots=max(1, slots), longest=longest, room=room)
        for role, (facts, slots, longest) in needs.items()
    }


def _engine(job: Job, facts: ModelFacts, way: Way, fleet: Fleet, *, slots: int, longest: int, room: float) -> Engine:
    footing = memory.footing_of(fleet.device).engine
    on_cpu, wide = fleet.device.on_cpu, way.tensor_parallel
    weights = memory.engine_weights(facts, job.bytes_per_value, tensor_parallel=wide, on_cpu=on_cpu)
    wanted = max(1, min(_MOST_SEQUENCES, round(job.completions * job.draws / slots)))
    a_token = memory.kv_bytes_per_token(facts, job.bytes_per_value) / way.tensor_parallel
    a_sequence = a_token * longest
    workspace = memory.engine_workspace(
        facts, job.bytes_per_value, sequences=wanted, tensor_parallel=way.tensor_parallel
    )
    if fleet.device.on_cpu:
        cache = max(1, -(-(a_sequence * wanted) // _CPU_KV_STEP)) * _CPU_KV_STEP
        return Engine(weights, cache, 0.0, footing, wanted)
    left = max(0.0, room - weights - workspace - footing)
    at_once = int(min(wanted, left // a_sequence))
    return Engine(weights, max(at_once, 1) * a_sequence, workspace, footing, at_once)


def _processes(way: Way, trainer: float, engines: Mapping[str, Engine]) -> Roles:
    """On a CPU: every process of every role, each with its own peak, in one memory."""
    slots = {"rollout": way.slots - way.judge_slots, "judge": way.judge_slots or way.slots}
    return {
        "trainer": trainer * way.ranks,
        **{role: engine.awake * slots[role] for role, engine in engines.items()},
    }


def _on_device(
    way: Way,
    footing: memory.Footing,
    engines: Mapping[str, Engine],
    *,
    trainer: float,
    resident: float,
    syncing: float,
) -> Mapping[str, Roles]:
    """The phases of a device that has every role, or, where roles are apart, of the fullest device of each phase."""
    awake = {role: engine.awake for role, engine in engines.items()}
    resting = {role: footing.asleep if way.sleeps else engine.awake for role, engine in engines.items()}
    apart = way.kind == "split"
    largest = max(resting, key=lambda role: resting[role])
    beside = {largest: resting[largest]} if apart else resting

    def working(role: str, trainer_holds: float) -> Roles:
        return {"trainer": trainer_holds, **({} if apart else resting), role: awake[role]}

    phases: dict[str, Roles] = {"train": {"trainer": trainer, **beside}}
    phases["wake-up and sync"] = working("rollout", syncing)
    phases["generate"] = working("rollout", resident)
    if "judge" in engines:
        phases["judge"] = working("judge", resident)
    return phases


def _seconds(job: Job, way: Way, fleet: Fleet, engines: Mapping[str, Engine]) -> Mapping[str, float]:
    """Generating and judging side by side are as long as the longer; one after the other, their sum and the swaps."""
    device, wide = fleet.device, way.tensor_parallel
    cores = fleet.count // way.ranks if device.on_cpu else 1
    rollout_slots = max(1, way.slots - (way.judge_slots if way.kind == "split" else 0))
    judge_slots = max(1, way.judge_slots if way.kind == "split" else way.slots)
    generate = timing.generate_s(
        job, device, slots=rollout_slots, tensor_parallel=wide, at_once=max(1, engines["rollout"].at_once)
    )
    judged = 0.0
    if job.judge is not None:
        at_once = max(1, engines["judge"].at_once)
        judged = timing.judge_s(job, device, slots=judge_slots, tensor_parallel=wide, at_once=at_once)
    swaps = timing.swap_s(job.policy, job, device) if way.sleeps else 0.0
    if job.judge is not None and way.kind != "split":
        swaps += timing.swap_s(job.judge, job, device)
    if way.kind == "dynamic":
        taken = (generate + judged) * 1.05  # near the work over the slots; the simulator says how near
    elif way.kind == "split":
        # A verdict can begin when a completion has ended, and the first ends after a part of the round.
        a_group = min(generate, judged) / max(1, job.prompts_per_step)
        taken = max(generate, judged) + a_group
    else:
        taken = generate + judged
    train = timing.train_s(job, way, device, cores=cores)
    sync = timing.sync_s(job, device)
    round_s = taken + swaps
    times = {"sync": sync, "generate": generate, "judge": judged, "swaps": swaps, "round": round_s, "train": train}
    return {name: value for name, value in times.items() if value or name != "judge"} | {"step": sync + round_s + train}
