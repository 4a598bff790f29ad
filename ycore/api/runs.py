"""Open the folder of a run or of a comparison, as Python users see them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ycore.errors import RunFolderError
from ycore.run.files import read_json
from ycore.run.metrics import read_metrics
from ycore.run.paths import RunFolder


class Run:
    """A run's folder: its settings, metrics and model. `Run("runs/first")` opens one that exists."""

    def __init__(self, folder: str | Path) -> None:
        """Open the folder; RunFolderError where it holds no run."""
        self.folder = Path(folder).expanduser()
        self._files = RunFolder(self.folder)
        if not self._files.config.is_file():
            raise RunFolderError(
                f"{folder} has no run.json, so it is no run's folder; name the run's `output`"
            )

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    def _repr_html_(self) -> str:
        """Show in a notebook how the run ended, and its last steps, or an evaluation's figures."""
        from ycore.api.tables import figure_rows
        from ycore.view.progress import as_html, steps_as_html

        summary = self.summary
        head = f"{self.folder}: {summary.get('status', 'opened')}"
        if self.config["algorithm"] == "eval" and summary:
            return as_html(head, [["figure", "value"], *figure_rows(summary)])
        return steps_as_html(head, self.metrics)

    @property
    def summary(self) -> dict[str, Any]:
        """How the run ended, and its figures, as summary.json has them; {} before that."""
        return dict(read_json(self._files.summary)) if self._files.summary.is_file() else {}

    @property
    def config(self) -> dict[str, Any]:
        """The settings, as run.json has them."""
        return dict(read_json(self._files.config)["config"])

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One mapping a step, by the names in docs/overview.md."""
        return read_metrics(self._files.metrics)

    @property
    def completions(self) -> list[dict[str, Any]]:
        """Every completion of an evaluation with its prompt and its rewards."""
        file = self.folder / "completions.jsonl"
        if not file.is_file():
            raise RunFolderError(
                f"{self.folder} has no completions.jsonl, which only an evaluation writes"
            )
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]

    def model(self, *, best: bool = False) -> Any:
        """Load the trained model with transformers, with peft's adapter around it where there is one.

        Args:
            best: the model that `keep_best` kept.
        """
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        from ycore.api.trained import trained_model
        from ycore.config.algorithms import find_algorithm

        scores = find_algorithm(self.config["algorithm"]).trains_reward_model
        loader: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
        return loader.from_pretrained(trained_model(str(self.folder), best=best), dtype="auto")

    def tokenizer(self) -> Any:
        """Load the model's tokenizer with transformers."""
        from transformers import AutoTokenizer

        from ycore.api.trained import trained_model

        return AutoTokenizer.from_pretrained(trained_model(str(self.folder)))

    def report(self) -> Path:
        """Write report.html into the folder, and return its path."""
        from ycore.view.page import make_report, write_report
        from ycore.view.record import read_run

        return write_report(make_report([read_run(self.folder)]), self.folder / "report.html")[
            0
        ]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Evaluations of several models on the same prompts.

    Attributes:
        folder: comparison.json, and differences.jsonl with every prompt, those first on which the models differ most.
        runs: each model's evaluation.
        differences: each model but the first: its figures less the first's, with intervals.
    """

    folder: Path
    runs: Mapping[str, Run]
    differences: Mapping[str, Mapping[str, float]]
    table: Sequence[Sequence[str]] = field(repr=False)

    def _repr_html_(self) -> str:
        from ycore.view.progress import as_html

        return as_html(str(self.folder), self.table)


@dataclass(frozen=True, slots=True, repr=False)
class Planned:
    """A plan: text when it is shown or printed, and in `values` what `--json` prints."""

    values: Mapping[str, Any]
    lines: Sequence[str]

    def __repr__(self) -> str:
        return "\n".join(self.lines)
