"""Whether a checkpoint is what its manifest says, looked at with this file's own eyes and not the product's.

Not here: the product's own check (`run_folder.checkpoints`), which is what is being tested.
"""

import hashlib
import json
from pathlib import Path

_PREFIX = "checkpoint-"


def published(checkpoints: Path) -> list[Path]:
    """Everything that has a checkpoint's name, oldest first."""
    found = [path for path in checkpoints.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(_PREFIX)))


def newest_problem(checkpoints: Path) -> str | None:
    """What is wrong with the newest checkpoint; None where all is right, or there is none yet."""
    found = published(checkpoints)
    return problem_of(found[-1]) if found else None


def problem_of(checkpoint: Path) -> str | None:
    """The first file that is missing, of another size or of another content than its manifest says."""
    try:
        listed = json.loads((checkpoint / "manifest.json").read_bytes())["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"{checkpoint.name}: no whole manifest ({type(error).__name__})"
    for name, told in listed.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{checkpoint.name}: {name} is missing"
        data = path.read_bytes()
        if len(data) != told["bytes"] or hashlib.sha256(data).hexdigest() != told["sha256"]:
            return f"{checkpoint.name}: {name} is not what was written"
    return None
