"""The runs that are recorded: begun, cut short, resumed, ended, and gone on with for longer; and how each goes on."""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.chaos.job import Job
from tests.chaos.power.recording import (
    Operation,
    build_recorder,
    read_log,
    recording_environment,
)
from tests.chaos.results import Difference, Result, compare, read_result
from tests.chaos.runs import Run, Setting, leftovers
from ycore.config.algorithms import find_entry
from ycore.config.schema import BaseConfig
from ycore.errors import RunError
from ycore.run.files import RunFolder, read_json
from ycore.run.resuming import round_file

RUN = "run"
"""The run's folder in the recorded one."""

_LIMIT_S = 240.0

Words = Callable[[Path], list[str]]


@dataclass(frozen=True, slots=True)
class Part:
    """One command of a recording. After a loss of power in it, a user gives it again, with `--resume` if it began."""

    words: Words
    disturb: Callable[[Run], bool] | None
    """None lets it end."""

    ends_with: int


@dataclass(frozen=True, slots=True)
class Phase:
    """A recorded command: its first operation, its settings, and what came of it or of the command that ended it."""

    first: int
    words: Words
    config: BaseConfig
    result: Result


@dataclass(frozen=True, slots=True)
class Recording:
    """`operations` of the whole scenario, in a folder with one run."""

    name: str
    operations: Sequence[Operation]
    phases: Sequence[Phase]

    def phase(self, cut: int) -> Phase:
        return [
            phase for phase in self.phases if phase.first <= cut or phase is self.phases[0]
        ][-1]


def rollout_parts(inputs: Path, *, steps: int = 6) -> list[Part]:
    """RL: the trainer is killed with a round that was committed and not trained on; resumed; two more steps."""
    job = Job(inputs, steps=steps)

    def killed(run: Run) -> bool:
        committed = round_file(run.folder.journal, steps - 3, 0)
        return run.wait_for(committed.is_file, timeout_s=_LIMIT_S) and run.send(
            "trainer", signal.SIGKILL
        )

    longer = replace(job, steps=steps + 2)
    return [Part(job.words, killed, 1), Part(job.words, None, 0), Part(longer.words, None, 0)]


def tuning_parts(inputs: Path, *, steps: int = 30) -> list[Part]:
    """SFT: Ctrl-C, which saves; resumed to its end, with a merged model."""

    def words(output: Path) -> list[str]:
        options: dict[str, Any] = {
            "--model": inputs / "model",
            "--dataset": "task:addition?digits=1",
            "--output": output,
            "--steps": steps,
            "--held-out": 8,
            "--learning-rate": 1e-3,
        }
        sets = (
            "dtype=float32",
            "lora.dropout=0.2",
            f"checkpoint_every={steps // 4}",
            "merge=true",
        )
        option_words = [
            str(word) for option, value in options.items() for word in (option, value)
        ]
        return [
            "sft",
            *option_words,
            *(word for setting in sets for word in ("--set", setting)),
        ]

    def interrupted(run: Run) -> bool:
        return run.wait_for(lambda: run.num_steps() >= 2, timeout_s=_LIMIT_S) and run.send(
            "launcher", signal.SIGINT
        )

    return [Part(words, interrupted, 130), Part(words, None, 0)]


def record(name: str, parts: Sequence[Part], setting: Setting) -> Recording:
    """Run every part in a recorded folder below `setting.place`; RunError where one ends otherwise than it should."""
    place = setting.place / name
    root, log = place / "recorded", place / "operations.log"
    root.mkdir(parents=True)
    library = build_recorder(place)
    recorded = replace(
        setting,
        environment={**setting.environment, **recording_environment(library, root, log)},
    )
    starts: list[tuple[int, Part, BaseConfig, Result]] = []
    for part in parts:
        first = len(read_log(log, root)) if log.is_file() else 0
        run = Run(recorded, resumed(part.words, root / RUN), root / RUN)
        _follow(run, part)
        starts.append((first, part, config_of(run.folder), read_result(run.folder)))
    phases = []
    for number, (first, part, config, _) in enumerate(starts):
        ended = next(result for _, later, _, result in starts[number:] if later.ends_with == 0)
        phases.append(Phase(first, part.words, config, ended))
    return Recording(name, read_log(log, root), phases)


def _follow(run: Run, part: Part) -> None:
    try:
        disturbed = part.disturb is None or part.disturb(run)
        status = run.wait(timeout_s=_LIMIT_S)
        left = leftovers(run)
    finally:
        run.end()
    if not disturbed or status != part.ends_with or left:
        raise RunError(
            f"a recorded run ended with {status}, not {part.ends_with}: {run.tail()} "
            f"(left: {', '.join(left) or 'nothing'}; see {run.log})"
        )


def config_of(folder: RunFolder) -> BaseConfig:
    """The settings in a run's run.json."""
    values = read_json(folder.config)["config"]
    config: BaseConfig = find_entry(values["algorithm"]).config.model_validate(values)
    return config


def resumed(words: Words, output: Path) -> list[str]:
    """The command that goes on, or begins where no run had begun."""
    return [*words(output), *(["--resume"] if (output / "run.json").is_file() else [])]


def go_on(phase: Phase, setting: Setting, output: Path) -> tuple[int | None, Difference, str]:
    """Give the phase's command again in `output`: its exit status, the difference of its result, its last line."""
    run = Run(setting, resumed(phase.words, output), output)
    try:
        status = run.wait(timeout_s=_LIMIT_S)
        left = leftovers(run)
    finally:
        run.end()
    difference = compare(phase.result, read_result(run.folder))
    return status, replace(difference, notes=(*difference.notes, *left)), run.tail(1)
