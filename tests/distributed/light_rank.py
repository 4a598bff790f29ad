"""A training rank that learns nothing, and the launcher of such ranks in accelerate's place, so that they start at once.

For tests of what machines tell each other, where the import of torch would be nearly all of a trial. Ranks share the run
folder: a stop that one of them has heard of is a file in it, and so is the order to fail, to hear of a stop after the
last step, to tell of none since its network is cut, or never to end after a stop.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from ycore.run.files import RunFolder, read_json
from ycore.run.interrupt import on_stop
from ycore.run.metrics import MetricsWriter
from ycore.run.reports import report_end, take_place, this_rank

MODULE = "tests.distributed.light_rank"
FAILS_WITH = "the loss is nan"
_LAUNCHER = "from tests.distributed.light_rank import launch\nlaunch()\n"
_STEP_S = 0.1


def write_launcher(folder: Path) -> Path:
    """Write a package that stands in for accelerate where the folder is on PYTHONPATH."""
    package = folder / "accelerate" / "commands"
    package.mkdir(parents=True)
    for path in (package.parent, package):
        (path / "__init__.py").touch()
    (package / "launch.py").write_text(_LAUNCHER)
    return folder


def launch() -> None:
    """`accelerate launch --config_file FILE -m MODULE RUN_FOLDER` for the ranks of this machine."""
    import yaml

    _, file, _, module, root = sys.argv[1:]
    settings = yaml.safe_load(Path(file).read_text())
    num_local = settings["num_processes"] // settings["num_machines"]
    ranks = []
    for local in range(num_local):
        variables = {
            "RANK": settings["machine_rank"] * num_local + local,
            "WORLD_SIZE": settings["num_processes"],
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": num_local,
        }
        environment = os.environ | {name: str(value) for name, value in variables.items()}
        ranks.append(subprocess.Popen([sys.executable, "-m", module, root], env=environment))
    codes = [rank.wait() for rank in ranks]
    sys.exit(int(any(codes)))


def main() -> int:
    folder, rank = RunFolder(Path(sys.argv[1])), this_rank()
    take_place(folder, rank)
    stop = threading.Event()
    on_stop(stop.set)
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    )  # of the clearing up; others see the file at once
    home = Path(read_json(folder.engines)["home"])
    stopped = home / "stopped"
    metrics = MetricsWriter(home / "metrics.jsonl")
    for step in range(1, read_json(folder.config)["config"]["steps"] + 1):
        folder.step_began.touch()
        if stop.is_set() and not (home / f"cut-{rank.number}").exists():
            stopped.touch()
        if stopped.exists():
            if (home / f"hangs-{rank.number}").exists():
                time.sleep(3600)
            report_end(folder, rank, 130)
            return 0
        if (home / f"fail-{rank.number}").exists():
            report_end(folder, rank, 1, FAILS_WITH)
            return 1
        if rank.number == 0:
            metrics.write({"step": step, "reward": 0.5, "ycore/reward": 0.5})
        time.sleep(_STEP_S)
    is_late = (home / f"is-stopped-late-{rank.number}").exists()
    report_end(folder, rank, 130 if is_late else 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
