"""How soon shared memory is known to be a run's: its maker is killed a moment after it made it.

`python -m tests.chaos.early_kills --trials 50 --after-ms 0,5,20,50`, from the repository root.
"""

import argparse
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ycore.launch.guardian import guarded
from ycore.launch.processes import ManagedProcess
from ycore.launch.segments import SHARED_MEMORY
from ycore.run.claim import Claim
from ycore.run.paths import RunFolder

_LIVES_S = 0.7  # before it makes anything, as an engine does
_BETWEEN_S = 0.15  # so that a few of the makers are there at a time, as a run's processes are

MAKER = """
import mmap, os, signal, sys, time
time.sleep(float(sys.argv[2]))
file = os.open(sys.argv[1], os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
os.ftruncate(file, 4096)
held = mmap.mmap(file, 4096)
end = time.monotonic() + float(sys.argv[3])
while time.monotonic() < end:
    time.sleep(0.0005)
os.kill(os.getpid(), signal.SIGKILL)
"""


def kill_early(root: Path, after_s: Sequence[float]) -> tuple[list[Path], list[Path]]:
    """Makers of a run, each killed so long after its segment is there, and as many that are not of the run.

    Returns: the files that the run's makers made, and those of the others, whether they are still there or not.
    """
    folder = RunFolder(root)
    folder.logs.mkdir(parents=True)
    held, runs, others = Claim(folder), [], []
    with guarded(folder, held):
        ends: list[ManagedProcess | subprocess.Popen[bytes]] = []
        for number, after in enumerate(after_s):
            time.sleep(_BETWEEN_S)
            own, other = (SHARED_MEMORY / f"psm_{secrets.token_hex(4)}" for _ in range(2))
            words = [str(_LIVES_S), str(after)]
            command = [sys.executable, "-S", "-c", MAKER]
            log = folder.log(f"maker-{number}")
            one = [*command, str(own), *words]
            ends.append(
                ManagedProcess(
                    f"m{number}", one, environment=os.environ, run_id=folder.run_id, log=log
                )
            )
            time.sleep(_BETWEEN_S)
            ends.append(subprocess.Popen([*command, str(other), *words], stdout=subprocess.DEVNULL))
            runs.append(own)
            others.append(other)
        for end in ends:
            status = end.wait(timeout_s=60.0) if isinstance(end, ManagedProcess) else end.wait(60.0)
            if status != -signal.SIGKILL:
                raise RuntimeError(f"a maker ended with {status}")
    held.release()
    return runs, others


def main() -> int:
    """Exit status 0 where no foreign file was removed; what is left of the run's is only counted."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.early_kills", description=__doc__)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--after-ms", default="0,5,20,50")
    parser.add_argument("--dry-run", action="store_true", help="start nothing")
    options, gone = parser.parse_args(), 0
    times = [float(word) for word in options.after_ms.split(",")]
    if options.dry_run:
        print(f"{options.trials} trials each, killed after {times} ms. Nothing was started.")
        return 0
    for after_ms in times:
        with tempfile.TemporaryDirectory() as place:
            began = time.monotonic()
            runs, others = kill_early(Path(place) / "run", [after_ms / 1000] * options.trials)
            left = [path for path in runs if path.exists()]
            gone += sum(not path.exists() for path in others)
            for path in (*runs, *others):
                path.unlink(missing_ok=True)
        what = f"left {len(left)} of {len(runs)}, foreign removed {gone}, {time.monotonic() - began:.0f} s"
        print(f"killed {after_ms:g} ms after the segment was there: {what}", flush=True)
    return int(gone > 0)


if __name__ == "__main__":
    raise SystemExit(main())
