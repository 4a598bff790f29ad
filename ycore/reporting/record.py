"""RunRecord: everything that a run's folder tells of it, read once.

Not here: what is made of it (`spent`, `compare`, `figures`, `page`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ycore.errors import RunFolderError
from ycore.reporting.spent import judging_share
from ycore.run_folder.files import read_json
from ycore.run_folder.paths import RunFolder
from ycore.telemetry.metrics import read_metrics
from ycore.telemetry.trace import read_trace

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Written:
    """A completion of the run's last rounds, with the sum of its rewards; None where a reward was not given."""

    prompt: str
    completion: str
    reward: float | None
    num_tokens: int
    finish_reason: str


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run; what it has not written yet is empty."""

    root: Path
    name: str
    config: Row
    command: Sequence[str]
    versions: Row
    started: str
    summary: Row
    metrics: Sequence[Row]
    samples: Row
    written: Sequence[Written]
    num_slots: int
    judging: float
    """The share of its engines' busy seconds that judges and reward models took (`spent.judging_share`)."""

    timeline: Path | None

    @property
    def is_finished(self) -> bool:
        return self.summary.get("status") == "finished"


def read_run(root: Path) -> RunRecord:
    """The run in `root`; RunFolderError where there is none, or none that has begun a step."""
    folder = RunFolder(root)
    if not folder.config.is_file():
        raise RunFolderError(f"{root} has no run.json, so it is no run's folder; name the folder that --output named")
    told = read_json(folder.config)
    metrics = read_metrics(folder.metrics)
    if not metrics:
        raise RunFolderError(f"{root} has no step yet: {folder.metrics} is missing or empty; wait for the first step")
    timeline = root / "timeline.png"
    return RunRecord(
        root=root,
        name=root.resolve().name,
        config=told.get("config", {}),
        command=tuple(told.get("command", ())),
        versions=told.get("versions", {}),
        started=str(told.get("started", "")),
        summary=_optional(folder.summary),
        metrics=metrics,
        samples=_optional(folder.samples),
        written=_last_written(folder, told.get("config", {})),
        num_slots=_num_slots(folder),
        judging=judging_share(read_trace(root / "trace.json")),
        timeline=timeline if timeline.is_file() else None,
    )


def _optional(file: Path) -> Row:
    try:
        found: Row = read_json(file)
    except (OSError, ValueError):
        return {}
    return found


def _num_slots(folder: RunFolder) -> int:
    """Slots of the run; a trainer that generates by itself is one."""
    told = _optional(folder.root / "engines.json")
    rollout = [name for name in told.get("engines", []) if isinstance(name, str)]
    return max(1, len(rollout))


def _last_written(folder: RunFolder, config: Row) -> list[Written]:
    """The completions of the newest round in the journal; none where none is kept or it cannot be read."""
    rounds = sorted(folder.journal.glob("round-*.json")) if folder.journal.is_dir() else []
    if not rounds:
        return []
    try:
        groups = json.loads(rounds[-1].read_text(encoding="utf-8"))["groups"]
        weights = [float(reward.get("weight", 1.0)) for reward in config.get("rewards", [])]
        return [one for group in groups for one in _of_group(group, weights)]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _of_group(group: Row, weights: Sequence[float]) -> list[Written]:
    prompt = as_text(group["draw"]["prompt"]["content"])
    return [
        Written(
            prompt, wrote["text"], _total(scores, weights), len(wrote["token_ids"]), str(wrote.get("finish_reason", ""))
        )
        for wrote, scores in zip(group["completions"], group["scores_GR"], strict=True)
    ]


def _total(scores: Sequence[Row], weights: Sequence[float]) -> float | None:
    values = [score["value"] for score in scores]
    given = [value * weight for value, weight in zip(values, weights, strict=True) if value is not None]
    return sum(given) if len(given) == len(values) else None


def as_text(content: Any) -> str:
    """A prompt as a line or two: a chat's last turn."""
    if isinstance(content, str):
        return content
    return str(content[-1].get("content", "")) if content else ""
