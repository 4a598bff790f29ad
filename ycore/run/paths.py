"""The paths of a run's files, its id, and its group in trackers. What is in a file belongs to who writes it."""

import hashlib
import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOCK = ".lock"

TRACKER_GROUP = "WANDB_RUN_GROUP"
"""wandb's own environment variable for runs that belong together."""


class RunFolder:
    """The files of a run: `RunFolder(Path("runs/quickstart")).metrics` is `runs/quickstart/metrics.jsonl`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lock = root / LOCK
        self._run_id: str | None = None
        self.config = root / "run.json"
        # Fingerprints of the rows, the model and the reward files that the run began with.
        self.identity = root / "identity.json"
        self.engines = root / "engines.json"  # the launcher writes it for the trainer
        self.metrics = root / "metrics.jsonl"
        self.trace = root / "trace.json"
        self.summary = root / "summary.json"
        # Completions to the same few prompts, before and after training.
        self.samples = root / "samples.json"
        # Measured on held-out rows before and after training, and for the best model.
        self.held_out = root / "held_out.json"
        self.curve = root / "curve.png"
        self.checkpoints = root / "checkpoints"
        # The rounds since the oldest checkpoint that is kept, or all of them.
        self.journal = root / "journal"
        self.images = root / "images"  # every picture once, named by its sha256
        # Denoising paths of pictures that a flow model drew, named by their sha256.
        self.trajectories = root / "trajectories"
        self.pictures = (
            root / "pictures.png"
        )  # drawn from the same noise before and after training
        self.model = root / "model"
        self.best = (
            root / "best"
        )  # the model that an evaluation found best, where the run keeps it
        self.logs = root / "logs"
        # Touched on every machine when a step begins; not there while the trainer is still starting.
        self.step_began = root / "step_began"
        # What the trainer, or who is in its place, is busy with beside its steps.
        self.work = root / "work.json"

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    @property
    def run_id(self) -> str:
        """The name of the run's shared memory and the mark of its processes, which the folder's lock file keeps.

        The id is random and not made from the path: two mount namespaces (a private /tmp, a container) show two folders
        under one path. It stays the folder's from resume to resume, because what a killed run has left is found by it.
        A copy of the folder does not have it: the copy's resume would end the original's processes. Before a run has
        claimed the folder, nothing has the id, and it follows from the path.
        """
        if self._run_id is None:  # kept, should the folder be removed while the run goes on
            self._run_id = read_run_id(self.lock)
        return self._run_id or hashlib.sha256(os.fsencode(self.root.resolve())).hexdigest()[:12]

    @property
    def temporary(self) -> Path:
        """The folder of the engines' temporary files and sockets; short, because a socket's path must be."""
        return Path(tempfile.gettempdir()) / f"ycore-{self.run_id}"

    @property
    def sockets(self) -> Path:
        """The 0700 folder of the run's sockets: inside the run folder, or the temporary one where that path is long."""
        # With a name in it, a path has at most 100 of the 108 bytes that the kernel allows.
        inside = self.root.resolve() / "sockets"
        return inside if len(os.fsencode(inside)) <= 80 else self.temporary

    def socket(self, engine: str) -> Path:
        return self.sockets / f"{engine}.sock"

    @property
    def shared_memory(self) -> Path:
        """The folder in which weights pass from trainer to engines: in memory where the machine offers it."""
        base = Path("/dev/shm")
        return base / f"ycore-{self.run_id}" if base.is_dir() else self.root / "weights"


def read_run_id(lock: Path) -> str | None:
    """Return the id in a lock file; None where there is none, or where the file is a copy of another folder's."""
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except OSError:
        return None
    try:
        return _read(descriptor)
    finally:
        os.close(descriptor)


def keep_run_id(descriptor: int) -> str:
    """Return the id in an open lock file, and write a new one where there is none."""
    run_id = _read(descriptor)
    if run_id is None:
        run_id = secrets.token_hex(6)
        data = json.dumps({"run_id": run_id, **_file_of(descriptor)}).encode() + b"\n"
        os.pwrite(descriptor, data, 0)  # in place, because the lock is on this very file
        os.ftruncate(descriptor, len(data))
    return run_id


def _read(descriptor: int) -> str | None:
    try:
        record: dict[str, Any] = json.loads(os.pread(descriptor, 4096, 0))
        run_id = str(record.pop("run_id"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return run_id if record == _file_of(descriptor) else None


def _file_of(descriptor: int) -> dict[str, int]:
    """Identify the file itself: a copy has another inode."""
    status = os.fstat(descriptor)
    return {"device": status.st_dev, "inode": status.st_ino}


@contextmanager
def tracker_group(name: str) -> Iterator[None]:
    """Make the runs that start meanwhile one group in trackers, unless the user has named another."""
    is_set = TRACKER_GROUP in os.environ
    os.environ.setdefault(TRACKER_GROUP, name)
    try:
        yield
    finally:
        if not is_set:
            del os.environ[TRACKER_GROUP]
