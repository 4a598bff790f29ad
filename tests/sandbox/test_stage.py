import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ycore.sandbox import EXIT_EXCESS, Level, Limits, View, confine
from ycore.sandbox.confine import landlock_refusal, python_paths, stage_steps
from ycore.sandbox.stage import landlock_abi

pytestmark = pytest.mark.skipif(landlock_refusal() is not None, reason=str(landlock_refusal()))
MIB = 2**20
UID = 61999 if os.geteuid() == 0 else None
BOOT = (
    "import sys; sys.path[:] = {paths}; from ycore.sandbox.stage import run_stage; run_stage()"
)


@pytest.fixture
def scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ycore-landlock-"))
    if UID is not None:
        os.chown(folder, UID, UID)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def open_path(tmp_path: Path) -> Path:
    """A folder that another user may enter, which pytest's own is not."""
    for folder in (tmp_path, *tmp_path.parents):
        if (
            folder.stat().st_uid == os.geteuid()
            and folder != Path("/")
            and not folder.stat().st_mode & 0o001
        ):
            folder.chmod(folder.stat().st_mode | 0o055)
    return tmp_path


def start(
    code: str,
    scratch: Path,
    folder: Path,
    *,
    view: View | None = None,
    limits: dict | None = None,
) -> subprocess.Popen[str]:
    (folder / "confined_code.py").write_text(code)
    view = view or View()
    view = view._replace(read=(*python_paths(), *view.read, folder))
    steps = stage_steps(Level.LANDLOCK, view, Limits(**(limits or {})), UID)
    paths = [str(folder), *(entry for entry in sys.path if os.path.isabs(entry))]
    line = [
        sys.executable,
        "-I",
        "-S",
        "-B",
        "-c",
        BOOT.format(paths=paths),
        json.dumps({**steps, "scratch": str(scratch)}),
        "confined_code",
    ]
    return subprocess.Popen(
        line,
        env={"PATH": "/usr/bin:/bin"},
        cwd=view.working or scratch,
        stdout=-1,
        stderr=-1,
        text=True,
    )


def run(code: str, scratch: Path, folder: Path, **keywords) -> tuple[int, str, str]:
    process = start(code, scratch, folder, **keywords)
    output, errors = process.communicate(timeout=240)
    return process.returncode, output, errors


HONEST = """
import os, sqlite3, subprocess, sys, tempfile, threading
import numpy
assert numpy.linalg.det(numpy.eye(3)) == 1.0
assert subprocess.run(["sh", "-c", "echo a b"], capture_output=True, text=True).stdout == "a b\\n"
with tempfile.TemporaryFile(dir=".") as file:
    file.write(b"x")
sqlite3.connect("x.db").execute("create table a (b)")
seen = []
thread = threading.Thread(target=seen.append, args=(1,))
thread.start(), thread.join()
print(os.getuid(), seen)
"""


def test_an_honest_module_runs(scratch: Path, open_path: Path) -> None:
    status, output, errors = run(HONEST, scratch, open_path)
    assert (status, output) == (0, f"{os.getuid() if UID is None else UID} [1]\n"), errors
    assert (scratch / "x.db").exists()


def test_its_status_is_the_modules(scratch: Path, open_path: Path) -> None:
    assert run("raise SystemExit(7)", scratch, open_path)[0] == 7
    assert run("import os; os.kill(os.getpid(), 9)", scratch, open_path)[0] == -9
    assert run(f"import os; os._exit({EXIT_EXCESS})", scratch, open_path)[0] == EXIT_EXCESS - 1
    status, _, errors = run("1 / 0", scratch, open_path)
    assert status == 1 and "ZeroDivisionError" in errors


def test_what_is_hidden_in_a_folder_stays_closed(scratch: Path, open_path: Path) -> None:
    project = open_path / "project"
    (project / "runs" / "mine").mkdir(parents=True)
    for name in ("data.txt", ".env", "runs/other.txt", "runs/mine/log"):
        (project / name).write_text(name)
    code = f"""
import os
from pathlib import Path
for name in ("data.txt", ".env", "runs/other.txt", "runs/mine/log"):
    try:
        print(open(Path({str(project)!r}) / name).read())
    except OSError as error:
        print(type(error).__name__)
print(os.getcwd())
"""
    view = View(
        read=(project,), hidden=(project / ".env", project / "runs" / "mine"), working=project
    )
    _, output, errors = run(code, scratch, open_path, view=view)
    expected = [
        "data.txt",
        "PermissionError",
        "runs/other.txt",
        "PermissionError",
        str(project),
    ]
    assert output.splitlines() == expected, errors


def test_a_link_in_a_folder_opens_nothing_beyond(scratch: Path, open_path: Path) -> None:
    (open_path / "secret").mkdir()
    (open_path / "secret" / "key").write_text("canary")
    project = open_path / "project"
    project.mkdir()
    (project / "link").symlink_to(open_path / "secret")
    (project / ".env").write_text("")
    code = f"print(open({str(project / 'link' / 'key')!r}).read())"
    folder = open_path / "code"
    folder.mkdir()
    for hidden in ((), (project / ".env",)):
        status, output, errors = run(
            code, scratch, folder, view=View(read=(project,), hidden=hidden)
        )
        assert (status, output) == (1, "") and "PermissionError" in errors


OPENS = """
import ctypes, fcntl, os, sys
secret, shown = {secret!r}, {shown!r}
name = os.path.basename(secret)

def by_handle():
    handle = ctypes.create_string_buffer(b"\\x80" + bytes(135))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.name_to_handle_at(-100, secret.encode(), handle, ctypes.byref(ctypes.c_int()), 0):
        raise OSError(ctypes.get_errno(), "refused")

ways = {{
    "a name": lambda: open(secret),
    "a name below a descriptor of its folder": lambda: os.open(
        name, os.O_RDONLY, dir_fd=os.open(os.path.dirname(secret), os.O_PATH)
    ),
    "a name from within": lambda: (
        os.fchdir(os.open(os.path.dirname(secret), os.O_PATH)), open(name)
    ),
    "a link to one": lambda: open(f"/proc/self/fd/{{os.open(secret, os.O_PATH)}}"),
    "a handle": by_handle,
    "a lock": lambda: fcntl.flock(os.open(secret, os.O_RDONLY), fcntl.LOCK_EX),
    "a lock on what is shown": lambda: fcntl.flock(os.open(shown, os.O_RDONLY), fcntl.LOCK_EX),
}}
for way, attempt in ways.items():
    try:
        attempt()
        print(way)
    except OSError:
        pass
"""


@pytest.mark.parametrize("is_closed", [False, True])
def test_what_may_not_be_read_is_reached_by_no_other_way(
    scratch: Path, open_path: Path, monkeypatch: pytest.MonkeyPatch, is_closed: bool
) -> None:
    """Where Python lies in a closed home, root's user keeps a right to read what is closed: it lifts no rule."""
    if is_closed:
        monkeypatch.setattr(confine, "closed_path", lambda _paths, roots: Path("/closed"))
    secret = open_path / "secret" / "key"
    secret.parent.mkdir()
    secret.write_text("canary")
    project = open_path / "project"
    project.mkdir()
    (project / "shown").write_text("shown")
    folder = open_path / "code"
    folder.mkdir()
    code = OPENS.format(secret=str(secret), shown=str(project / "shown"))
    status, output, errors = run(code, scratch, folder, view=View(read=(project,)))
    assert (status, output) == (0, "a lock on what is shown\n"), errors


@pytest.mark.parametrize(
    ("code", "limits", "word"),
    [
        ("import os\nfor _ in range(4): os.fork()\nb = b'x' * (24 << 20)", {"memory": 128 * MIB}, "memory"),
        ("for n in range(64): open(str(n), 'wb').write(b'x' * (1 << 20))", {"scratch": 8 * MIB}, "MiB of files"),
        ("for n in range(5000): open(str(n), 'wb').close()", {"files": 500}, "files"),
        ("import os\ntry:\n  while os.fork(): pass\nexcept OSError: pass", {"processes": 10}, "processes"),
        (
            "files = []\nimport os\nfor n in range(64):\n"
            "  files.append(open('f', 'wb')); os.unlink('f'); files[-1].write(b'x' * (1 << 20)); files[-1].flush()",
            {"scratch": 8 * MIB},
            "MiB of files",
        ),
    ],
)  # fmt: skip
def test_what_holds_too_much_is_ended(
    scratch: Path, open_path: Path, code: str, limits: dict, word: str
) -> None:
    status, _, errors = run(
        f"{code}\nimport time; time.sleep(30)", scratch, open_path, limits=limits
    )
    assert status == EXIT_EXCESS and word in errors.splitlines()[-1]


def test_nothing_is_left_after_the_end_and_after_the_stages_parent(
    scratch: Path, open_path: Path
) -> None:
    code = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(60)
        os._exit(0)
print("ready", flush=True)
"""
    for ending, stays in (("", False), ("; time.sleep(60)", True)):
        process = start(f"{code}{ending.removeprefix('; ')}", scratch, open_path)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        family = psutil.Process(process.pid).children(recursive=True)
        if stays:
            assert len(family) >= 6
            process.terminate()
        process.communicate(timeout=120)
        deadline = time.monotonic() + 120
        while (
            any(descendant.is_running() for descendant in family)
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        assert not [descendant for descendant in family if descendant.is_running()]


def test_the_kernel_is_asked() -> None:
    assert landlock_abi() >= 1


def test_nothing_is_left_of_a_fork_bomb(scratch: Path, open_path: Path) -> None:
    code = """
import os
print("ready", flush=True)
while True:
    try:
        if os.fork() == 0:
            os.setsid()
    except OSError:
        pass
"""
    process = start(code, scratch, open_path, limits={"processes": 40})
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.communicate(timeout=240)  # too many processes: the stage ends them by itself
    left = []
    for running in psutil.process_iter(["cmdline", "status"]):
        if (
            str(scratch) in " ".join(running.info["cmdline"] or [])
            and running.info["status"] != psutil.STATUS_ZOMBIE
        ):
            left.append(running)
    assert left == []
