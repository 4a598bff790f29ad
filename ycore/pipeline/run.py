"""Running a pipeline: the steps one after another, each a command's own run in a folder of its own.

What is finished is not done again; what was begun goes on from its own checkpoint. Both are read from the steps'
folders (`state`), so that a kill at any moment loses no more than a single run would.

Not here: the commands themselves, which the caller gives (`Commands`).
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ycore.config.kinds import AnyConfig
from ycore.config.run import RunConfig
from ycore.errors import Interrupted, RunFolderError, YcoreError
from ycore.pipeline.declaration import PAIRS, Pipeline
from ycore.pipeline.pairs import write_pairs
from ycore.pipeline.report import report_file, write_report
from ycore.pipeline.resolving import config_of, in_stage, stood_in
from ycore.pipeline.state import goes_on, has_pairs, state_of
from ycore.pipeline.steps import PAIRS_FILE, Step
from ycore.run_folder.files import read_json, write_json_atomic
from ycore.run_folder.paths import RunFolder
from ycore.run_folder.prepare import Claim
from ycore.run_folder.private import make_private

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
