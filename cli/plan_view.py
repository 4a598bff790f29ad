"""A plan as a person reads it: the ways ranked, the memory of the best by role and phase, its seconds by phase.

Not here: the plan (`ycore.planning`).
"""

from collections.abc import Iterator, Sequence

from ycore.planning.devices import GIB
from ycore.planning.machine import in_words
from ycore.planning.make import Plan
from ycore.planning.phases import Forecast
from ycore.planning.search import why_not

_WAYS_THAT_DO_NOT = 2


def print_plan(made: Plan, *, top: int) -> None:
    """To standard output."""
    for line in plan_lines(made, top=top):
        print(line)


def plan_lines(made: Plan, *, top: int) -> Iterator[str]:
    """The lines, one at a time."""
    yield from _head(made)
    yield ""
    if made.fitting:
        yield from _ranking(made.fitting[:top])
        yield ""
        yield from _memory(made.fitting[0])
        yield ""
        yield from _times(made.fitting[0])
    else:
        yield "nothing fits"
        for one in made.others[:top]:
            yield f"  {one.way.in_words}: {why_not(one)}"
        yield from _nearest(made)
    if made.fitting and made.others:
        yield ""
        yield "does not fit"
        for one in made.others[:_WAYS_THAT_DO_NOT]:
            yield f"  {one.way.in_words}: {why_not(one)}"


def _head(made: Plan) -> Iterator[str]:
    job, device = made.job, made.fleet.device
    trained = "every weight" if job.lora_rank is None else f"LoRA r={job.lora_rank}"
    yield f"model    {job.policy.name}: {job.policy.num_params / 1e9:.2f} billion parameters, {trained}"
    if job.judge is not None:
        yield f"judge    {job.judge.name}: {job.judge.num_params / 1e9:.2f} billion parameters"
    speed = in_words(device) if device.on_cpu else device.source
    yield f"devices  {made.fleet.in_words}: {device.memory_bytes / GIB:.0f} GiB; {speed}"
    yield (
        f"step     {job.prompts_per_step} prompts of {job.prompt_tokens} tokens x {job.group_size} completions "
        f"of {job.completion_tokens}, {job.max_tokens} at most; {job.draws:g} groups for each kept"
    )


def _ranking(ways: Sequence[Forecast]) -> Iterator[str]:
    yield f"{'step':>9}  {'tokens/s':>9}  {'fullest phase':<28}  way"
    for one in ways:
        phase, peak = one.peak
        full = f"{peak / GIB:.1f} of {one.capacity / GIB:.1f} GiB, {phase}"
        yield f"{one.step_s:>7.1f} s  {one.tokens_per_s:>9,.0f}  {full:<28}  {one.way.in_words}"


def _memory(one: Forecast) -> Iterator[str]:
    roles = list(dict.fromkeys(role for phase in one.phases.values() for role in phase))
    where = "all processes of a role" if "all at once" in one.phases else "one device"
    yield f"memory of the first, GiB of {where}"
    yield "  " + f"{'phase':<18}" + "".join(f"{role:>10}" for role in roles) + f"{'all':>10}"
    for phase, sizes in one.phases.items():
        cells = "".join(f"{sizes.get(role, 0) / GIB:>10.1f}" for role in roles)
        yield f"  {phase:<18}{cells}{sum(sizes.values()) / GIB:>10.1f}"
    parts = ", ".join(f"{part} {size / GIB:.2f}" for part, size in one.trainer.items() if size >= 0.005 * GIB)
    yield f"  trainer of a rank: {parts}"
    for role, engine in one.engines.items():
        yield (
            f"  {role} engine: weights {engine.weights / GIB:.2f}, cache {engine.kv_cache / GIB:.2f} "
            f"for {engine.at_once} sequences at once, workspace {engine.workspace / GIB:.2f}"
        )


def _times(one: Forecast) -> Iterator[str]:
    yield "seconds of a step of the first"
    yield "  " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in one.seconds.items())


def _nearest(made: Plan) -> Iterator[str]:
    if not made.mends:
        yield "no change of batch, length, LoRA or devices, nor two of them, nor a smaller model would fit"
        return
    yield "what would fit, nearest first"
    for mend in made.mends:
        yield f"  {mend.change}: {mend.forecast.step_s:.1f} s a step, {mend.forecast.way.in_words}"
