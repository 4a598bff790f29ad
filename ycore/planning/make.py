"""A whole plan: the job of a run on some devices, the ways that fit, the ways that do not, and what would mend them.

Not here: how it is shown (`ycore_cli.plan_view`).
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from ycore.config.run import RunConfig
from ycore.planning import machine
from ycore.planning.devices import GIB, Device, Fleet, parse_devices
from ycore.planning.job import SHARDINGS, Job
from ycore.planning.jobs import asks_checkpointing, job_of, micro_batch_of
from ycore.planning.known import known_models, model_facts
from ycore.planning.phases import Forecast
from ycore.planning.search import Mend, mends, ranked, ways, why_not


@dataclass(frozen=True, slots=True)
class Plan:
    """`fitting` are ways that fit, fastest first; `others` those that do not, least over first."""

    job: Job
    fleet: Fleet
    fitting: tuple[Forecast, ...]
    others: tuple[Forecast, ...]
    mends: tuple[Mend, ...]
    """Nearest settings that fit, where nothing does."""

    def as_json(self, *, top: int) -> dict[str, Any]:
        """JSON values; bytes are bytes and seconds seconds."""
        return {
            "model": asdict(self.job.policy) | {"num_params": self.job.policy.num_params},
            "judge": None if self.job.judge is None else self.job.judge.name,
            "devices": asdict(self.fleet.device) | {"count": self.fleet.count},
            "job": {key: value for key, value in asdict(self.job).items() if key not in ("policy", "judge")},
            "fits": [_as_json(one) for one in self.fitting[:top]],
            "does_not_fit": [_as_json(one) | {"why": why_not(one)} for one in self.others[:top]],
            "nearest": [{"change": mend.change} | _as_json(mend.forecast) for mend in self.mends],
        }


def make_plan(
    config: RunConfig,
    *,
    devices: str | None = None,
    judge: str | None = None,
    judge_tokens: int | None = None,
    prompt_tokens: int | None = None,
    completion_tokens: int | None = None,
    processor: Device | None = None,
) -> Plan:
    """The plan of a run; UserError where a model, a device or a size is not to be had.

    Args:
        devices: as `--devices`; None is every core of this machine.
        judge: a model's name; `judge_tokens` is what it may write.
        processor: one core of this machine; measured where it is needed and not given.
    """
    policy = model_facts(config.model)
    judged = None if judge is None else model_facts(judge)
    fleet = _fleet(devices, processor)
    job = job_of(
        config, policy, judge=judged, judge_tokens=judge_tokens,
        prompt_tokens=prompt_tokens, completion_tokens=completion_tokens,
    )  # fmt: skip
    micro_batch = micro_batch_of(config, ranks=fleet.count, on_cpu=fleet.device.on_cpu)
    shardings = [config.accelerate] if config.accelerate in SHARDINGS else None
    candidates = ways(job, fleet, micro_batch=micro_batch, shardings=shardings)
    wanted = asks_checkpointing(config.trl)
    candidates = [way for way in candidates if wanted is None or way.checkpointing == wanted]
    fitting, others = ranked(job, fleet, candidates)
    nearest: tuple[Mend, ...] = ()
    if not fitting:
        nearest = tuple(mends(job, fleet, micro_batch=micro_batch) or _smaller_model(job, fleet, micro_batch))
    return Plan(job, fleet, tuple(fitting), tuple(others), nearest)


def _smaller_model(job: Job, fleet: Fleet, micro_batch: int) -> list[Mend]:
    """The largest model of the table that fits in this one's place."""
    known = sorted((model_facts(name) for name in known_models()), key=lambda facts: -facts.num_params)
    for facts in known:
        if facts.num_params < job.policy.num_params:
            smaller = replace(job, policy=facts)
            fitting, _ = ranked(smaller, fleet, ways(smaller, fleet, micro_batch=micro_batch))
            if fitting:
                return [Mend(f"--model {facts.name}", fitting[0])]
    return []


def _fleet(devices: str | None, core: Device | None) -> Fleet:
    """What `--devices` means; the processor is measured only where the plan is for it."""
    asked = devices or "cpu"
    on_cpu = asked.strip().lower().endswith("cpu")
    measured = core or (machine.processor() if on_cpu else _NOT_ASKED_FOR)
    return parse_devices(asked, processor=measured, num_cores=machine.num_cores())


_NOT_ASKED_FOR = Device("core", GIB, 1e9, 1e9, 1e9, "not measured", on_cpu=True)


def _as_json(one: Forecast) -> dict[str, Any]:
    phase, peak = one.peak
    return {
        "way": asdict(one.way) | {"in_words": one.way.in_words},
        "peak_phase": phase,
        "peak_bytes": round(peak),
        "capacity_bytes": round(one.capacity),
        "memory": {name: {role: round(size) for role, size in roles.items()} for name, roles in one.phases.items()},
        "trainer": {part: round(size) for part, size in one.trainer.items()},
        "engines": {role: asdict(engine) for role, engine in one.engines.items()},
        "seconds": {name: round(seconds, 3) for name, seconds in one.seconds.items()},
    }
