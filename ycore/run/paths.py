"""RunFolder: where each thing of a run lies. Paths only; what is written there belongs to who writes it."""

import hashlib
import os
import tempfile
from pathlib import Path

from ycore.run.run_id import LOCK, read_run_id


class RunFolder:
    """The files of a run: `RunFolder(Path("runs/quickstart")).metrics` is `runs/quickstart/metrics.jsonl`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lock = root / LOCK
        self._run_id: str | None = None
        self.config = root / "run.json"
        self.identity = (
            root / "identity.json"
        )  # fingerprints of the rows, model and reward files it began with
        self.engines = root / "engines.json"  # what the launcher has started, for the trainer
        self.metrics = root / "metrics.jsonl"
        self.trace = root / "trace.json"
        self.summary = root / "summary.json"
        self.memory = root / "memory.json"  # the most that each process of each role held, in bytes
        self.samples = (
            root / "samples.json"
        )  # completions to the same few prompts, before and after training
        self.held_out = (
            root / "held_out.json"
        )  # measured on held-out rows before and after, and of the best model
        self.curve = root / "curve.png"
        self.timeline = root / "timeline.png"
        self.checkpoints = root / "checkpoints"
        self.journal = (
            root / "journal"
        )  # the rounds since the oldest checkpoint that is kept, or all of them
        self.images = root / "images"  # every picture once, named by its sha256
        self.trajectories = (
            root / "trajectories"
        )  # of pictures that a flow model drew, files named by their sha256
        self.pictures = root / "pictures.png"  # drawn from the same noise before and after training
        self.model = root / "model"
        self.best = root / "best"  # the model that an evaluation found best, where the run keeps it
        self.logs = root / "logs"
        # Touched on every machine when a step begins; not there while the trainer is still starting.
        self.step_began = root / "step_began"

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    @property
    def run_id(self) -> str:
        """Names the run's shared memory and marks its processes: random, and in the folder once a run has claimed it.

        Before that nothing has the id, and it follows from the path.
        """
        if self._run_id is None:  # kept, should the folder be removed while the run goes on
            self._run_id = read_run_id(self.lock)
        return self._run_id or hashlib.sha256(os.fsencode(self.root.resolve())).hexdigest()[:12]

    @property
    def temporary(self) -> Path:
        """Where the run's engines put their own temporary files and sockets; short, because a socket's path must be."""
        return Path(tempfile.gettempdir()) / f"ycore-{self.run_id}"

    @property
    def sockets(self) -> Path:
        """The 0700 folder of the run's sockets: inside the run folder, or the temporary one where that path is long."""
        inside = (
            self.root.resolve() / "sockets"
        )  # with a name in it, at most 100 of the 108 bytes that the kernel allows
        return inside if len(os.fsencode(inside)) <= 80 else self.temporary

    def socket(self, engine: str) -> Path:
        return self.sockets / f"{engine}.sock"

    @property
    def shared_memory(self) -> Path:
        """Where weights pass from trainer to engines: memory where the machine offers it, else the run folder."""
        base = Path("/dev/shm")
        return base / f"ycore-{self.run_id}" if base.is_dir() else self.root / "weights"
