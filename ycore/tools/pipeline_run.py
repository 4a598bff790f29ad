"""Running a pipeline: the steps one after another, each a command's own run in a folder of its own.

What is finished is not done again; what was begun goes on from its own checkpoint. Both are read from the steps'
folders (`state`), so that a kill at any moment loses no more than a single run would.

From a step's keys to the configuration of its run, by the same rules as the command's recipe.

How far a step has come, read from its own run folder: there is no second record that could say otherwise.

pipeline.json: what a pipeline is, how far it has come and what every stage reached; and the table of its end.

Not here: the commands themselves, which the caller gives (`Commands`).
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeGuard

from ycore.config.algorithms import RUN, AnyConfig, is_tuning, kind_of, tune_kind
from ycore.config.resolve import resolve_as
from ycore.config.schema import RunConfig
from ycore.errors import Interrupted, RunError, RunFolderError, UserError, YcoreError
from ycore.run.claim import Claim
from ycore.run.files import make_private, read_json, write_json_atomic
from ycore.run.paths import RunFolder
from ycore.tools.preference_pairs import write_pairs
from ycore.tools.stages import PAIRS, PAIRS_FILE, Pipeline, Step

_SETS: Mapping[str, Mapping[str, str]] = {"rloo": {"preset": "rloo"}}
"""What a command says by its name."""


def config_of(step: Step, pipeline: Pipeline) -> AnyConfig:
    """The step's run; a UserError that names the stage where a key or a value cannot be."""
    algorithm = "eval" if step.command == PAIRS else step.command
    fields = kind_of(algorithm).config.model_fields
    recipe = {key: value for key, value in pipeline.defaults.items() if key in fields} | dict(step.keys)
    own = {"algorithm": algorithm, "output": str(step.folder), **_SETS.get(algorithm, {})}
    with in_stage(step):
        if is_tuning(algorithm):
            return resolve_as(tune_kind(algorithm), recipe=recipe, options=own)
        return resolve_as(RUN, recipe=recipe, options=own)


def stood_in(step: Step) -> Step | None:
    """The step with models that are not made yet replaced by what they begin from; None where that cannot be."""
    missing = {path: origin for path, origin in step.stands_for.items() if not Path(path).exists()}
    known = {path: origin for path, origin in missing.items() if origin is not None}
    if len(known) < len(missing):
        return None
    return replace(step, keys=_swapped(step.keys, known))


@contextmanager
def in_stage(step: Step) -> Iterator[None]:
    """Puts the stage's name before the message of an error that is raised inside."""
    try:
        yield
    except (UserError, RunError) as error:
        raise type(error)(f"stage {step.name}: {error}") from error


def _swapped(value: Any, paths: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        for path, other in paths.items():
            value = other if value == path else value
        return value
    if isinstance(value, Mapping):
        return {key: _swapped(item, paths) for key, item in value.items()}
    return [_swapped(item, paths) for item in value] if isinstance(value, list) else value


State = Literal["to do", "begun", "finished"]

_EVALUATES = ("eval", PAIRS)


def state_of(step: Step) -> State:
    """`begun` has a run.json and no good end; a run that was killed before it had one is still to do."""
    folder = RunFolder(step.folder)
    if not folder.config.is_file():
        return "to do"
    ended = folder.summary.is_file() and read_json(folder.summary).get("status") == "finished"
    return "finished" if ended else "begun"


def has_pairs(step: Step) -> bool:
    return (step.folder / PAIRS_FILE).is_file()


def measures(step: Step) -> bool:
    """Whether the step trains nothing: such a one begins anew where it was stopped."""
    return step.command in _EVALUATES


def goes_on(step: Step) -> bool:
    """Whether the step's run resumes inside itself; a measurement begins anew, and its folder is cleared for that."""
    if state_of(step) != "begun":
        return False
    if not measures(step):
        return True
    held = Claim(RunFolder(step.folder))  # waits until what is left of the killed run is gone
    try:
        for path in step.folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    finally:
        held.release()
    return False


Status = Literal["running", "finished", "interrupted", "failed"]

_NOT_FIGURES = ("status", "wall_s", "error")


def report_file(root: Path) -> Path:
    return root / "pipeline.json"


def write_report(
    root: Path, declared: Mapping[str, Any], steps: Sequence[Step], status: Status, *, error: str | None = None
) -> dict[str, Any]:
    """Write and return the report; its figures are those of the stages' own summaries."""
    stages = [_stage(step) for step in steps]
    seconds = [stage["wall_s"] for stage in stages if stage["wall_s"] is not None]
    report: dict[str, Any] = {"status": status, "wall_s": round(sum(seconds), 1), "stages": stages}
    if error is not None:
        report["error"] = error
    report["pipeline"] = dict(declared)
    write_json_atomic(report_file(root), report)
    return report


def table_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A line a stage: what it is called, how it ended, and the figure that tells most."""
    rows = []
    for stage in report["stages"]:
        took = "" if stage["wall_s"] is None else f", {stage['wall_s']:.0f} s"
        told = headline(stage["figures"])
        rows.append((stage["name"], f"{stage['command']}: {stage['status']}{took}" + (f", {told}" if told else "")))
    return rows


def headline(figures: Mapping[str, Any]) -> str:
    """What went from where to where, or the one number that there is; held-out rows before the run's own."""
    held_out = figures.get("held_out") or {}
    before, after = held_out.get("before") or {}, held_out.get("after") or {}
    for name, first, last in (
        ("held-out accuracy", before.get("accuracy"), after.get("accuracy")),
        ("reward", figures.get("reward_first"), figures.get("reward_last")),
        ("held-out loss", before.get("loss"), after.get("loss")),
        ("loss", figures.get("loss_first"), figures.get("loss_last")),
    ):
        if _is_number(first) and _is_number(last):
            return f"{name} {first:.3f} -> {last:.3f}"
    told = [f"{name} {figures[name]:.3f}" for name in ("reward", "pass@1") if _is_number(figures.get(name))]
    pairs = figures.get("num_pairs")
    return ", ".join([*([f"{pairs} pairs"] if pairs is not None else []), *told])


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _stage(step: Step) -> dict[str, Any]:
    folder = RunFolder(step.folder)
    summary = read_json(folder.summary) if folder.summary.is_file() else {}
    state = state_of(step)
    return {
        "name": step.name,
        "command": step.command,
        "status": summary.get("status", "to do" if state == "to do" else "begun"),
        "wall_s": summary.get("wall_s"),
        "figures": {key: value for key, value in summary.items() if key not in _NOT_FIGURES},
        "makes": step.makes,
    }


Say = Callable[[str], None]


class Commands(Protocol):
    """The commands, as a pipeline uses them."""

    def check(self, config: AnyConfig, *, resume: bool) -> list[tuple[str, str]]:
        """The plan's rows; a UserError where the run cannot work. Starts nothing."""

    def run(self, config: AnyConfig, *, resume: bool) -> Mapping[str, Any]:
        """The whole run, in the foreground; its summary."""


def check_pipeline(pipeline: Pipeline, steps: Sequence[Step], commands: Commands, *, show: Say) -> None:
    """Every step's plan, before any of them begins; what an earlier step makes is checked when its time comes."""
    for number, step in enumerate(steps, start=1):
        show(f"stage {number} of {len(steps)}: {step.name} ({step.command})")
        config_of(step, pipeline)  # its keys and values, whatever can be said of their files
        if state_of(step) == "finished":
            show("  finished already")
            continue
        ready = stood_in(step)
        if ready is None:
            made = [path for path, origin in step.stands_for.items() if origin is None and not Path(path).exists()]
            show(f"  takes {', '.join(made)} from an earlier stage; checked in full when that is there")
            continue
        with in_stage(step):
            for name, text in commands.check(config_of(ready, pipeline), resume=state_of(step) == "begun"):
                show(f"  {name:<8}  {text}".rstrip())


def run_pipeline(
    pipeline: Pipeline,
    steps: Sequence[Step],
    commands: Commands,
    *,
    declared: Mapping[str, Any],
    resume: bool,
    say: Say,
) -> dict[str, Any]:
    """The report of the whole, which is also in pipeline.json however it ends."""
    root = Path(pipeline.output)
    check_folder(root, declared, resume=resume)
    make_private(root)
    held = Claim(RunFolder(root))
    try:
        write_report(root, declared, steps, "running")
        for number, step in enumerate(steps, start=1):
            where = f"stage {number} of {len(steps)}: {step.name} ({step.command})"
            if _is_done(step):
                say(f"{where}: finished already")
                continue
            say(where)
            stop_asked = _take(step, pipeline, commands)
            write_report(root, declared, steps, "running")
            if stop_asked and number < len(steps):  # it came as the stage was ending, and means the pipeline too
                raise KeyboardInterrupt
        return write_report(root, declared, steps, "finished")
    except (Interrupted, KeyboardInterrupt) as error:
        stopped = f"stopped in {step.name}; the same command goes on with --resume"
        write_report(root, declared, steps, "interrupted", error=stopped)
        raise Interrupted(stopped) from error
    except YcoreError as error:
        write_report(root, declared, steps, "failed", error=str(error))
        raise
    finally:
        held.release()


def check_folder(root: Path, declared: Mapping[str, Any], *, resume: bool) -> None:
    """RunFolderError unless the folder is new, empty, or this pipeline's own, to go on with."""
    if not report_file(root).is_file():
        if resume:
            raise RunFolderError(f"--resume needs the folder of a pipeline, and {root} holds none; leave it out")
        if root.exists() and (not root.is_dir() or any(path.name != ".lock" for path in root.iterdir())):
            raise RunFolderError(f"--output must be new or empty, and {root} is not; choose another --output")
        return
    there = read_json(report_file(root))
    if there.get("pipeline") != dict(declared):
        raise RunFolderError(f"{root} holds another pipeline; choose another --output, or give the file as it was")
    if there["status"] == "finished":
        raise RunFolderError(f"{root} holds this pipeline, finished; choose another --output to run it again")
    if not resume:
        raise RunFolderError(
            f"{root} holds this pipeline, not finished; go on with --resume, or choose another --output"
        )


def _is_done(step: Step) -> bool:
    return state_of(step) == "finished" and (step.command != PAIRS or has_pairs(step))


def _take(step: Step, pipeline: Pipeline, commands: Commands) -> bool:
    """Run the step, or what is left of it; whether somebody asked it to stop and it was through all the same."""
    config, stop_asked = config_of(step, pipeline), False
    if state_of(step) != "finished":
        resume = goes_on(step)
        with in_stage(step):
            commands.check(config, resume=resume)
            stop_asked = bool(commands.run(config, resume=resume).get("stop_asked"))
    if step.command == PAIRS:
        assert isinstance(config, RunConfig)
        weights = [reward.weight for reward in config.rewards]
        num_pairs = write_pairs(step.folder, weights=weights, compare=step.compare, to=step.folder / PAIRS_FILE)
        summary = RunFolder(step.folder).summary
        write_json_atomic(summary, {**read_json(summary), "num_pairs": num_pairs})
    return stop_asked
