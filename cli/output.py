"""The last page of a training run: completions before and after, where things lie, what to try next.

What the commands print: text for people, or exactly one JSON object on standard output.

Not here: the run's own closing line with its rewards, which `ycore.launch` says.
"""

import json
import math
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from ycore.config.schema import RunConfig
from ycore.run.files import read_json
from ycore.run.paths import RunFolder


@contextmanager
def stdout_for_json(wanted: bool) -> Iterator[None]:
    """While it lasts, whatever this process or a child of it writes to standard output goes to standard error."""
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
    """One line on standard output; numbers that JSON does not have become null."""
    print(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False), flush=True)


def print_table(rows: Iterable[tuple[str, str]]) -> None:
    """Two columns, the first as wide as its longest entry."""
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    for name, text in rows:
        print(f"{name:<{width}}  {text}".rstrip())


def number(value: Any) -> str:
    """A number as a person reads it: `0.4167`, `60`, `1.0e-05`."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_closing(config: RunConfig) -> None:
    """Everything a person wants to know once a run is through."""
    folder = RunFolder(Path(config.output))
    if folder.samples.is_file():
        _print_samples(read_json(folder.samples))

    print_table(
        [
            ("model", str(folder.model)),
            ("curve", str(folder.curve)),
            ("metrics", str(folder.metrics)),
            *_plan_rows(folder),
            ("try next", eval_command(config, folder)),
            ("", "ycore grpo --model MODEL --dataset your.jsonl --reward your.py:score"),
        ]
    )


def _plan_rows(folder: RunFolder) -> list[tuple[str, str]]:
    """The plan's figures beside the run's, where they could be compared."""
    rows = read_json(folder.summary).get("plan_and_measured", []) if folder.summary.is_file() else []
    told = [f"{row['what']} {row['planned']:.2f} {row['unit']}, was {row['measured']:.2f}" for row in rows]
    return [("planned" if index == 0 else "", line) for index, line in enumerate(told)]


def eval_command(config: RunConfig, folder: RunFolder) -> str:
    """The command that measures this run's model, on held-out rows where the dataset has a split of them."""
    words = ["ycore", "eval", "--model", str(folder.model), "--dataset", config.dataset]
    if config.dataset.startswith(("task:", "gym:")):
        words += ["--split", "test"]
    for reward in config.rewards:
        words += ["--reward", reward.reward]
    return shlex.join([*words, "--max-tokens", str(config.max_tokens)])


def _print_samples(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("prompt", "before", "after", show_lines=True)
    for before, after in zip(samples["before"], samples["after"], strict=True):
        table.add_row(
            escape(_text(before["prompt"])), escape(before["completion"].strip()), escape(after["completion"].strip())
        )
    Console().print(table)


def _text(prompt: str | Sequence[Mapping[str, str]]) -> str:
    """The prompt as a line: a chat's last turn."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]
