"""RunFolder: where each thing of a run lies. Paths only; what is written there belongs to who writes it."""

import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

_MAX_SOCKET_PATH = 100  # the kernel's limit on a unix socket's path is 108 bytes


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Example: `RunFolder(Path("runs/quickstart")).metrics` is `runs/quickstart/metrics.jsonl`."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "run.json"

    @property
    def identity(self) -> Path:
        """What the run learned from at its first start: fingerprints of rows, model and reward files."""
        return self.root / "identity.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def memory(self) -> Path:
        """The most that each process of each role held, in bytes."""
        return self.root / "memory.json"

    @property
    def step_began(self) -> Path:
        """Touched when a step begins, on every machine; not there while the trainer is still starting."""
        return self.root / "step_began"

    @property
    def samples(self) -> Path:
        """Completions to the same few prompts, before and after training."""
        return self.root / "samples.json"

    @property
    def held_out(self) -> Path:
        """What a run without rollouts measured on held-out rows, before and after."""
        return self.root / "held_out.json"

    @property
    def curve(self) -> Path:
        return self.root / "curve.png"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def journal(self) -> Path:
        """The rounds since the oldest checkpoint that is kept, or all of them."""
        return self.root / "journal"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    @property
    def run_id(self) -> str:
        """Short, unique to this folder on this machine: names its shared memory and marks its processes."""
        return hashlib.sha256(os.fsencode(self.root.resolve())).hexdigest()[:12]

    @property
    def sockets(self) -> Path:
        """The 0700 folder of the run's sockets: inside the run folder, or in a temporary one where its path is long."""
        inside = self.root.resolve() / "sockets"
        if len(os.fsencode(inside)) + 20 <= _MAX_SOCKET_PATH:
            return inside
        return Path(tempfile.gettempdir()) / f"ycore-{self.run_id}"

    def socket(self, engine: str) -> Path:
        return self.sockets / f"{engine}.sock"

    @property
    def shared_memory(self) -> Path:
        """Where weights pass from trainer to engines: memory where the machine offers it, else the run folder."""
        base = Path("/dev/shm")
        return base / f"ycore-{self.run_id}" if base.is_dir() else self.root / "weights"
