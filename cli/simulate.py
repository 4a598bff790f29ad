"""`ycore simulate`: a round under every placement, in virtual time: how long, how idle, and which placement to use."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from ycore_cli import options as o
from ycore_cli.output import print_json
from ycore_cli.plan import sizes_of, whole_number

from ycore.errors import ConfigError, RunFolderError

if TYPE_CHECKING:
    from ycore.plan.comparison import Comparison, Result, Scenario
    from ycore.plan.recording import Request
    from ycore.plan.tails import Played

Name = Annotated[
    str | None,
    typer.Argument(metavar="[RECIPE]", help="Sizes from a recipe, by name or YAML file."),
]
NumSlots = Annotated[str, typer.Option("--slots", metavar="N", help="Slots of a machine; e.g. 8.")]
JudgeWork = Annotated[
    str, typer.Option(metavar="X", help="Judging time over writing time; e.g. 0.5; 0 is no judge.")
]
SwapSeconds = Annotated[
    str, typer.Option(metavar="S", help="Seconds of a sleep and a wake-up together; e.g. 6.8.")
]
StepTime = Annotated[
    str,
    typer.Option(metavar="BASE:EACH", help="Milliseconds of an engine's step, and per request."),
]
Machines = Annotated[str, typer.Option(metavar="N", help="Machines with so many slots each.")]
JudgeDevices = Annotated[
    str, typer.Option(metavar="N", help="Devices of a slot: one judge, N engines of the policy.")
]
TrainSeconds = Annotated[
    str | None,
    typer.Option(
        metavar="S", help="Also play whole steps; seconds of training on all slots; e.g. 40."
    ),
]
Drafts = Annotated[
    str | None,
    typer.Option(
        metavar="N:SHARE", help="With --train-s: drafts of N tokens, SHARE accepted; e.g. 4:0.5."
    ),
]
Rounds = Annotated[str, typer.Option(metavar="N", help="Rounds to simulate.")]


def simulate(
    context: typer.Context,
    name: Name = None,
    model: o.Model = None,
    slots: NumSlots = "8",
    trace: o.Trace = None,
    judge_work: JudgeWork = "0.5",
    mean_tokens: o.MeanTokens = None,
    swap_s: SwapSeconds = "0",
    step_time: StepTime = "12:0.2",
    machines: Machines = "1",
    judge_devices: JudgeDevices = "1",
    rounds: Rounds = "8",
    train_s: TrainSeconds = None,
    oversample: o.Oversample = None,
    drafts: Drafts = None,
    picture: o.Picture = None,
    prompts_per_step: o.PromptsPerStep = None,
    group_size: o.GroupSize = None,
    max_tokens: o.MaxTokens = None,
    dynamic_sampling: o.DynamicSampling = None,
    seed: o.Seed = None,
    set_: o.Set = None,
    json: o.Json = False,
) -> None:
    """Compare placements in virtual time, without an engine.

    The decisions are a live run's; lengths and speeds are assumed, or a run's own. See docs/placement.md.

    \b
    ycore simulate --slots 8 --prompts-per-step 64 --max-tokens 8192 --judge-work 0.3 --swap-s 6.8
    ycore simulate --judge-work 0 --slots 8 --prompts-per-step 64 --train-s 40 --oversample 1.5
    """
    from ycore.plan.comparison import Scenario, compare_assumed, compare_recorded, recommend

    config, (base_ms, _, each_ms) = (
        sizes_of(context, name, model="smollm2-135m"),
        step_time.partition(":"),
    )
    scenario = Scenario(
        num_slots=whole_number("--slots", slots),
        swap_s=_number("--swap-s", swap_s),
        num_rounds=whole_number("--rounds", rounds),
        warm_up=3,
        group_size=config.group_size,
        need=config.prompts_per_step,
        dynamic=config.sampling.dynamic,
        max_tries=config.sampling.max_tries,
        max_tokens=config.max_tokens,
        mean_tokens=_number("--mean-tokens", mean_tokens, least=1)
        if mean_tokens
        else config.max_tokens / 3,
        judge_work=_number("--judge-work", judge_work),
        step_s=(
            _number("--step-time", base_ms) / 1000,
            _number("--step-time", each_ms or "0") / 1000,
        ),
        seed=config.seed,
        num_machines=whole_number("--machines", machines),
        engines=whole_number("--judge-devices", judge_devices),
    )
    requests = None if trace is None else _recorded_requests(Path(trace))
    steps = [] if train_s is None else _steps(scenario, requests, train_s, oversample, drafts)
    played = compare_assumed(scenario) if requests is None else compare_recorded(requests, scenario)
    if picture is not None:
        _draw(played, Path(picture))
    _show(played, recommend(played.results), steps, as_json=json)


def _show(played: "Comparison", best: "Result", steps: "list[Played]", *, as_json: bool) -> None:
    if as_json:
        print_json(
            _as_json(played, best) | ({"steps": [asdict(one) for one in steps]} if steps else {})
        )
        return
    _print_results(played, best)
    if steps:
        _print_steps(steps)


def _steps(
    scenario: "Scenario",
    requests: "list[list[Request]] | None",
    train_s: str,
    oversample: str | None,
    drafts: str | None,
) -> "list[Played]":
    """Whole steps."""
    from ycore.plan.tails import compare_steps

    factor, drafted = _number("--oversample", oversample or "1.5", least=1), None
    if drafts is not None:
        number, _, share = drafts.partition(":")
        drafted = whole_number("--drafts", number), min(1.0, _number("--drafts", share or "0.5"))
    return compare_steps(
        scenario, requests, _number("--train-s", train_s), oversample=factor, drafts=drafted
    )


def _print_steps(steps: "list[Played]") -> None:
    from rich.console import Console
    from rich.table import Table

    print(
        "whole steps, of writing and training alone; what is carried over is read again at no cost:"
    )
    table = Table("way", "engine slots", "step", "faster", "tokens early", "tokens")
    for one in steps:
        slots = "all" if one.rolling is None else str(one.rolling)
        ratio = f"{steps[0].seconds / one.seconds:.2f}"
        table.add_row(
            one.name,
            slots,
            f"{one.seconds:.1f} s",
            ratio,
            f"{one.early_tokens:.0f}",
            f"{one.tokens:.0f}",
        )
    Console().print(table)


def _recorded_requests(run: Path) -> "list[list[Request]]":
    """The requests of the run's first rank, round by round."""
    from ycore.plan.recording import requests_of
    from ycore.run.trace import read_trace

    spans = [span for span in read_trace(run / "trace.json") if span.rank == 0]
    if not spans:
        raise RunFolderError(
            f"no trace in {run / 'trace.json'}; a run writes it while its engines are vLLM's"
        )
    return requests_of(spans)


def _print_results(played: "Comparison", best: "Result") -> None:
    """Shortest round first."""
    from rich.console import Console
    from rich.table import Table

    print(played.note)
    table = Table("placement", "round", "idle", "over the bound", "swaps", "swapping")
    for result in sorted(played.results, key=lambda result: result.seconds):
        table.add_row(
            f"{result.placement}{'  <- use this' if result is best else ''}",
            f"{result.seconds:.1f} s",
            f"{result.idle_share:.0%}",
            f"{result.bound_ratio:.2f}",
            f"{result.swaps:.1f}",
            f"{result.swap_s:.1f} s",
        )
    Console().print(table)
    print(f"use --placement {best.placement}: {_why(best, played)}")
    if best.seconds > 1.01 * played.longest_first_s:
        print(
            f"prompts that come again begin with the longest: then a round takes {played.longest_first_s:.1f} s"
        )


def _why(best: "Result", played: "Comparison") -> str:
    others = [result for result in played.results if result is not best]
    near = min(others, key=lambda result: result.seconds, default=None)
    if near is None:
        return "there is no other role to place"
    share = near.seconds / best.seconds - 1
    if share < 0:
        return f"{near.placement} is {-share:.1%} shorter here, but must be chosen anew when lengths drift"
    return f"{near.placement}, the next, takes {share:.1%} longer"


def _as_json(played: "Comparison", best: "Result") -> dict[str, Any]:
    return {
        "note": played.note,
        "recorded_s": played.recorded_s,
        "use": str(best.placement),
        "longest_first_s": played.longest_first_s,
        "placements": [
            {
                "placement": str(result.placement),
                "round_s": result.seconds,
                "idle_share": result.idle_share,
                "bound_ratio": result.bound_ratio,
                "swaps": result.swaps,
                "swap_s": result.swap_s,
            }
            for result in played.results
        ],
    }


def _draw(played: "Comparison", path: Path) -> None:
    """The last round of every placement, on one scale."""
    from ycore.view.pictures import draw_panels

    ranked = sorted(played.results, key=lambda result: result.seconds)
    lasts = [(result.placement, result.rounds[-1]) for result in ranked]
    draw_panels(
        [(f"{placement}: {last.usage.seconds:.1f} s", last.lanes) for placement, last in lasts],
        path,
    )


def _number(option: str, text: str, *, least: float = 0) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value < 1e9:
        raise ConfigError(f"{option} takes a number of {least:g} or more; it is {text!r}")
    return value
