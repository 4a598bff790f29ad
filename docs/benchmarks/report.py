"""From measured steps to the table of docs/benchmarks.md. Pure."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from contestants import Step

FASTER_THAN_TRL = {16: 1.3, 128: 2.5}
"""Steps per hour of ycore over those of TRL, by the limit on tokens: at least this much."""

TRAINER_OVER_BARE = 1.25
"""ycore's trainer over a bare forward and backward of the same tokens: at most this much."""

Runs = Sequence[Sequence[Step]]


def counted(run: Sequence[Step]) -> Sequence[Step]:
    """Return all steps but the first, which warms up; a run of one step has no other."""
    return run[1:] or run


def summarise(trl: Runs, ycore: Runs, bare: Mapping[str, Any]) -> dict[str, Any]:
    """Summarise one limit on tokens: both sides, the ratio of their medians and of each pair of runs, trainer over bare."""
    sides = {"trl": side(trl), "ycore": side(ycore)}
    return {
        **sides,
        "ratio": sides["trl"]["seconds"] / sides["ycore"]["seconds"],
        "ratio_by_pair": [
            side([a])["seconds"] / side([b])["seconds"] for a, b in zip(trl, ycore, strict=True)
        ],
        "bare": dict(bare),
        "trainer_over_bare": trainer_over_bare(ycore, bare),
    }


def side(runs: Runs) -> dict[str, Any]:
    """Return medians over the counted steps of all runs."""
    steps = [step for run in runs for step in counted(run)]
    seconds = [step.seconds for step in steps]
    return {
        "seconds": median(seconds),
        "min": min(seconds),
        "max": max(seconds),
        "steps_per_hour": 3600 / median(seconds),
        "counted": len(steps),
        "parts": {name: median(step.parts[name] for step in steps) for name in steps[0].parts},
        "tokens": median(step.tokens for step in steps),
        "mean_completion": median(step.mean_completion for step in steps),
    }


def trainer_over_bare(ycore: Runs, bare: Mapping[str, Any]) -> float:
    """Divide the trainer's seconds by what the bare passes take for the tokens of the same step; return the median."""
    per_token: float = median(bare["seconds"]) / bare["tokens"]
    return median(
        step.parts["train"] / (step.tokens * per_token)
        for run in ycore
        for step in counted(run)
    )


def as_markdown(results: Mapping[str, Any]) -> str:
    """Write the tables, ready to paste."""
    levels = {int(tokens): level for tokens, level in results["levels"].items()}
    blocks = [
        _settings(results),
        _speed(levels, results["trl_batch_size"]),
        _parts(levels),
        _trainer(levels),
    ]
    return "\n\n".join([*blocks, _machine(results["machine"])]) + "\n"


def _settings(results: Mapping[str, Any]) -> str:
    settings = results["settings"]
    steps = ", ".join(
        f"{steps} at {tokens} tokens" for tokens, steps in settings["steps"].items()
    )
    batch = f"{settings['num_prompts']} prompts x {settings['group_size']} completions a step"
    turns = f"{settings['repeats']} runs of each side in turn; steps a run: {steps}; the first of each is not counted"
    return f"{settings['model']}, {settings['dtype']}: {batch}; {turns}."


def _speed(levels: Mapping[int, Mapping[str, Any]], batch_size: Mapping[str, int]) -> str:
    rows = []
    for tokens, level in levels.items():
        names = {"trl": f"TRL, micro-batch {batch_size[str(tokens)]}", "ycore": "ycore"}
        for name, label in names.items():
            figures = level[name]
            spread = f"{figures['seconds']:.1f} | {figures['min']:.1f} to {figures['max']:.1f}"
            amount = f"{figures['mean_completion']:.1f} | {figures['tokens']:.0f}"
            rows.append(
                f"{tokens} | {label} | {spread} | {figures['steps_per_hour']:.0f} | {amount} | "
            )
        pairs = level["ratio_by_pair"]
        verdict = _against(level["ratio"], FASTER_THAN_TRL.get(tokens), at_least=True)
        rows[-1] += f"**{level['ratio']:.2f}** ({min(pairs):.2f} to {max(pairs):.2f}){verdict}"
    head = "tokens | side | s a step | range | steps an hour | mean completion | tokens a step | times TRL"
    return _table(head, rows)


def _parts(levels: Mapping[int, Mapping[str, Any]]) -> str:
    rows = []
    for tokens, level in levels.items():
        for name in ("trl", "ycore"):
            parts = ", ".join(
                f"{part} {seconds:.1f}" for part, seconds in level[name]["parts"].items()
            )
            rows.append(f"{tokens} | {name} | {parts}")
    return _table("tokens | side | where a step's seconds go", rows)


def _trainer(levels: Mapping[int, Mapping[str, Any]]) -> str:
    rows = []
    for tokens, level in levels.items():
        bare, train = level["bare"], level["ycore"]["parts"]["train"]
        seconds = median(bare["seconds"])
        passes = f"batches of {bare['batch_size']}, {'with' if bare['autocast'] else 'without'} autocast"
        speed = f"{seconds:.1f} ({passes}, {bare['padding']:.1%} padding) | {bare['tokens'] / seconds:.0f}"
        verdict = _against(level["trainer_over_bare"], TRAINER_OVER_BARE, at_least=False)
        rows.append(
            f"{tokens} | {train:.1f} | {bare['tokens']} | {speed} | **{level['trainer_over_bare']:.2f}**{verdict}"
        )
    return _table(
        "tokens | ycore's trainer, s a step | tokens of a round | bare, s | tokens/s | trainer over bare",
        rows,
    )


def _against(value: float, limit: float | None, *, at_least: bool) -> str:
    if limit is None:
        return ""
    holds = value >= limit if at_least else value <= limit
    return f", {'holds' if holds else 'misses'} {'>=' if at_least else '<='} {limit:g}"


def _machine(machine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"Machine: {machine['cores']} cores of {machine['processor']} ({', '.join(machine['flags'])}), "
        f"{machine['memory_gib']} GiB. {versions}."
    )


def _table(head: str, rows: Sequence[str]) -> str:
    rule = " | ".join("---" for _ in head.split("|"))
    return "\n".join(f"| {line.strip()} |" for line in (head, rule, *rows))
