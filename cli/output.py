"""Print tables for people, or exactly one JSON object on standard output."""

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ycore.api.tables import Rows, aligned, folded
from ycore.errors import ConfigError
from ycore.run.files import RunFolder, json_safe, read_json
from ycore.run.text import named_first, printable

if TYPE_CHECKING:
    from ycore.config.schema import RunConfig, TuneConfig


@contextmanager
def stdout_for_json(wanted: bool) -> Iterator[None]:
    """If wanted, send standard output of this process and its children to standard error; only JSON stays on it."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one line on standard output; NaN and infinity, which JSON does not have, become null."""
    print(json.dumps(json_safe(value), ensure_ascii=False, allow_nan=False), flush=True)


def print_line(text: str, *, stream: TextIO | None = None) -> None:
    """Print a line that may hold what a model, a dataset or a reward wrote; on standard output by default."""
    print(printable(text, one_line=True), file=stream, flush=True)


def print_table(rows: Iterable[Sequence[str]]) -> None:
    for line in aligned(rows):
        print_line(line)


def newest_run(command: str, can_use: Callable[[RunFolder], bool], *, need: str) -> Path:
    """Find the newest run in `runs` that a command can use, and say which it is; ConfigError with the `need` for none."""
    configs = sorted(Path("runs").glob("*/run.json"), key=lambda file: -file.stat().st_mtime)
    for config in configs:
        if can_use(RunFolder(config.parent)):
            print_line(f"the newest run: {config.parent}", stream=sys.stderr)
            return config.parent
    raise ConfigError(
        f"ycore {command} takes the newest run {need}, and the folder runs has none; name one, e.g. "
        f"ycore {command} runs/first"
    )


def print_closing(config: "RunConfig | TuneConfig") -> None:
    """Print the end of a training run: samples before and after, where its files are, what to try next."""
    folder = RunFolder(Path(config.output))
    if folder.samples.is_file():
        _print_samples(read_json(folder.samples))
    summary = read_json(folder.summary) if folder.summary.is_file() else {}
    rows = [
        *evaluation_rows(folder, summary, config.algorithm_row.figures),
        ("model", str(folder.model)),
        ("curve", str(folder.curve)),
        ("metrics", str(folder.metrics)),
    ]
    if "advice" in summary:
        rows += folded([("advice", str(summary["advice"]))])
    print_table([*rows, *named_first("try next", _next_commands(config))])


def _next_commands(config: "RunConfig | TuneConfig") -> Iterator[str]:
    """Yield what a user does next with the model: talk to it, measure it as the run did, train on own data."""
    from ycore.config.schema import TuneConfig

    folder = RunFolder(Path(config.output))
    trusted = ["--trust-remote-code"] if config.trust_remote_code else []
    if isinstance(config, TuneConfig):
        words = ["eval", "--model", str(folder.model), "--reward", "exact_answer"]
        if config.algorithm_row.trains_reward_model:
            words = ["grpo", "--model", config.model, "--reward", f"rm:{folder.model}"]
        yield shlex.join(["ycore", *words, *trusted, "--dataset", "FILE"])
        return
    yield shlex.join(["ycore", "chat", *trusted, str(folder.root)])
    yield shlex.join(_measuring_command(config) or ["ycore", "report", str(folder.root)])
    yield "ycore grpo --model MODEL --dataset yours.jsonl --reward yours.py:score"


def _measuring_command(config: "RunConfig") -> list[str] | None:
    """Return the `ycore eval` of the run's held-out rows; None where options cannot say all of it."""
    from ycore.config.schema import RewardConfig

    rewards = config.eval_rewards or config.rewards
    held_out = config.for_evaluation()
    is_in_recipe_alone = (
        config.has_turns
        or config.few_shot
        or config.changed_sampling
        or config.trl.get("chat_template_kwargs")
        or any(spec != RewardConfig(reward=spec.reward) for spec in rewards)
    )
    if held_out is None or held_out.mixture or is_in_recipe_alone:
        return None
    model = str(RunFolder(Path(config.output)).model)
    words = ["ycore", "eval", "--model", config.model, "--model", model]
    words += ["--dataset", held_out.dataset]
    words += ["--trust-remote-code"] if config.trust_remote_code else []
    for spec in rewards:
        words += ["--reward", spec.reward]
    options = {
        "--split": held_out.split if held_out.split != "train" else None,
        "--num-samples": config.num_samples,
        "--max-tokens": config.max_tokens,
        "--prompt-column": config.prompt_column,
        "--answer-column": config.answer_column,
        "--limit": held_out.limit,
        "--system-prompt": config.system_prompt,
    }
    for option, value in options.items():
        if value is not None:
            words += [option, str(value)]
    for name, column in config.columns.items():
        words += ["--set", f"columns.{name}={column}"]
    return words


def _print_samples(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("prompt", "before", "after", show_lines=True)
    for before, after in zip(samples["before"], samples["after"], strict=True):
        prompt = before["prompt"]
        if not isinstance(prompt, str):
            prompt = prompt[-1]["content"]
        texts = prompt, before["completion"], after["completion"]
        table.add_row(*(Text(printable(text.strip())) for text in texts))
    Console().print(table)


def evaluation_rows(
    folder: RunFolder, summary: Mapping[str, Any], names: Sequence[str] = ()
) -> Rows:
    """List the figures of the run's evaluations, by these names or all with an interval, and the best model."""
    rows = [("ended early", str(summary["ended_early"]))] if "ended_early" in summary else []
    if ends := summary.get("held_out"):
        before = ends["before"]
        after = ends["after"]
        known = [
            name for name in names if isinstance(before.get(name), float) and name in after
        ]
        if not names:  # with rewards of 0 and 1, pass@1 is the reward once more
            pairs = {
                (before[name], after[name]): name
                for name in reversed(after)
                if name in before and f"{name}/low" in after
            }
            known = list(reversed(pairs.values()))
        lines = (f"{name} {before_and_after(ends, name)}" for name in known)
        rows += named_first("held out", lines)
    if best := summary.get("best"):
        rows.append(("best model", f"{folder.best}, of step {best['step']}"))
    return rows


def before_and_after(ends: Mapping[str, Mapping[str, float]], name: str) -> str:
    """Say a figure at both ends of a run, with its interval where it has one."""
    after = ends["after"]
    text = f"{ends['before'][name]:.3f} -> {after[name]:.3f}"
    if f"{name}/low" in after:
        text += f", 95 % interval {after[f'{name}/low']:.3f} to {after[f'{name}/high']:.3f}"
    return text
