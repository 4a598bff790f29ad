"""Which processes are a run's: marks that a process passes on to all that it starts, whatever it does to hide.

- A variable in the environment, `YCORE_RUN`. It is lost by who starts a process with an environment of its own.
- A cgroup of the run's own, where this user may make one: below the launcher's, so that its limits still hold. Only who
  may write to the cgroup file system can leave it.
- A resource limit (Linux). Processes inherit limits through fork, exec, setsid and a cleared environment, and anybody
  may read them. RLIMIT_RTTIME bounds a real-time process alone, in microseconds, so a soft limit of 36,000 years with
  the run's id in its lower digits limits nothing, and is a mark that needs no right. A child subreaper would not do: it
  gets every orphan of its descendants, also of those that a user's own program has started, and none once it is killed.
"""

import hashlib
import os
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from ycore.run.reports import RUN_MARKER

_MARK = 1 << 60  # microseconds; the id's 48 bits are added
_REMOVED_WITHIN_S = 2.0  # a process that has just been killed may still be counted
_HIERARCHIES = ("freezer", "pids", "name=systemd")  # of cgroup v1, where there is no v2


def mark_of(run_id: str) -> int:
    """The run's soft limit of RLIMIT_RTTIME."""
    return _MARK | int.from_bytes(hashlib.sha256(run_id.encode()).digest()[:6])


def own(pid: int, run_id: str) -> None:
    """Mark a process that was just started, before it starts others; a system that refuses a mark has the rest."""
    if sys.platform != "linux":
        return
    with suppress(OSError, ValueError):  # it has ended, or has a lower limit already
        _, hard = resource.prlimit(pid, resource.RLIMIT_RTTIME)
        resource.prlimit(pid, resource.RLIMIT_RTTIME, (mark_of(run_id), hard))
    for group in groups_of(run_id):
        with suppress(OSError):
            (group / "cgroup.procs").write_text(str(pid))


def is_owned(process: psutil.Process, run_id: str) -> bool:
    """Whether a process has one of the run's marks."""
    with suppress(psutil.Error, OSError):  # another user's, a zombie, or gone
        if process.environ().get(RUN_MARKER) == run_id:
            return True
    with suppress(OSError):
        if f" {mark_of(run_id)} ".encode() in Path(f"/proc/{process.pid}/limits").read_bytes():
            return True
    with suppress(OSError):
        groups = Path(f"/proc/{process.pid}/cgroup").read_text().splitlines()
        return any(f"ycore-{run_id}" in group.split("/") for group in groups)
    return False


def make_group(run_id: str) -> None:
    """Make the run's cgroup, in the first hierarchy where that is allowed; nothing where none allows it."""
    for place in _places():
        with suppress(OSError):
            (place / f"ycore-{run_id}").mkdir(exist_ok=True)
            return


def groups_of(run_id: str) -> list[Path]:
    """The run's cgroup; none where it could not be made."""
    return [path for place in _places() if (path := place / f"ycore-{run_id}").is_dir()]


def members_of(run_id: str) -> set[int]:
    """Process ids in the run's cgroup and in those below it; none where there is no such group."""
    found = set[int]()
    for place in (place for group in groups_of(run_id) for place, _, _ in os.walk(group)):
        with suppress(OSError):
            found.update(map(int, Path(place, "cgroup.procs").read_text().split()))
    return found


def kill_group(run_id: str) -> None:
    """SIGKILL to all of the run's cgroup at once, which no forking outruns; only v2 has this."""
    for group in groups_of(run_id):
        with suppress(OSError):
            (group / "cgroup.kill").write_text("1")


def remove_group(run_id: str) -> None:
    """Remove the run's cgroup, and those that its processes have made in it, once they are empty."""
    deadline = time.monotonic() + _REMOVED_WITHIN_S
    while groups := groups_of(run_id):
        for group in groups:
            for place, _, _ in os.walk(group, topdown=False):
                with suppress(OSError):
                    os.rmdir(place)
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def _places() -> list[Path]:
    """This process's own cgroups in the file system, v2 first; none on a system without them."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own_path = {
        name: path
        for _, names, path in (line.split(":", 2) for line in lines)
        for name in names.split(",")
    }
    found: dict[str, Path] = {}
    for mount in mounts:
        root, point, (kind, _, options) = mount[3], mount[4], mount[mount.index("-") + 1 :]
        names = [""] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []
        for name in names:
            path = own_path.get(name)
            if path is not None and name in ("", *_HIERARCHIES) and Path(path).is_relative_to(root):
                found.setdefault(name, Path(point) / Path(path).relative_to(root))
    return [found[name] for name in ("", *_HIERARCHIES) if name in found]
