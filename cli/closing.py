"""The last page of a training run: completions before and after, where things lie, what to try next.

Not here: the run's own closing line with its rewards, which `ycore.launch` says.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ycore.config.run import RunConfig
from ycore.run_folder.files import read_json
from ycore.run_folder.paths import RunFolder


def print_closing(config: RunConfig) -> None:
    """Everything a person wants to know once a run is through."""
    folder = RunFolder(Path(config.output))
    if folder.samples.is_file():
        _print_samples(read_json(folder.samples))
    from ycore_cli.output import print_table

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
