"""How far a step has come, read from its own run folder: there is no second record that could say otherwise.

Not here: a run's own resuming (`run_folder`, the commands).
"""

import shutil
from typing import Literal

from ycore.pipeline.declaration import PAIRS
from ycore.pipeline.steps import PAIRS_FILE, Step
from ycore.run_folder.files import read_json
from ycore.run_folder.paths import RunFolder
from ycore.run_folder.prepare import Claim

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
