"""How confined processes are started: what they are told, who they become, and what they can still read."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ycore.sandbox import Confinement, Level, Limits, View, confine, namespaces, stage
from ycore.sandbox.confine import Launch, closed_path, confined_environment, confined_launch
from ycore.sandbox.level import level_refusal
from ycore.sandbox.namespaces import bwrap_command
from ycore.sandbox.stage import CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_SETGID, CAP_SETUID
from ycore.sandbox.user_code import user_code_confinement

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux confines processes")
ALL_RIGHTS = 2**41 - 1
DOCKERS = sum(1 << number for number in (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31))


def test_the_environment_holds_a_few_harmless_variables_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = {
        "HF_TOKEN": "x",
        "LANG": "C",
        "LC_ALL": "C",
        "HOME": "/h",
        "PATH": "/p",
        "SSL_CERT_FILE": "c",
        "A": "b",
    }
    monkeypatch.setattr(os, "environ", parent)
    seen = confined_environment(View(), run_id="one", scratch=tmp_path)
    assert {"HF_TOKEN", "A", "SSL_CERT_FILE"} & set(seen) == set()
    assert seen["LANG"] == "C" and seen["LC_ALL"] == "C" and seen["YCORE_RUN"] == "one"
    assert seen["HOME"] == seen["TMPDIR"] == str(tmp_path) and seen["HF_HUB_OFFLINE"] == "1"
    online = confined_environment(View(network=True), run_id="one", scratch=tmp_path)
    assert online["SSL_CERT_FILE"] == "c" and "HF_HUB_OFFLINE" not in online


def test_a_cache_of_models_is_named_only_where_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    seen = confined_environment(View(read=(tmp_path,)), run_id="", scratch=tmp_path)
    assert seen["HF_HOME"] == str(tmp_path / "hf")
    assert "HF_HOME" not in confined_environment(View(), run_id="", scratch=tmp_path)


def test_what_is_closed_to_others_is_found_by_every_folder_on_the_way(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    file = inner / "rewards.py"
    file.write_text("")
    assert closed_path([Path("/"), Path("/no/such/thing")]) is None
    (tmp_path / "a").chmod(0o700)
    assert closed_path([file], roots=[tmp_path / "a"]) == tmp_path / "a"
    assert closed_path([file], roots=[inner]) is None, "the sandbox makes what lies above anew"
    file.chmod(0o600)
    assert closed_path([file], roots=[inner]) == file


@pytest.mark.parametrize(
    ("rights", "closed", "uid", "keep"),
    [
        (ALL_RIGHTS, None, 61184, None),
        (ALL_RIGHTS, Path("/h"), 61184, CAP_DAC_READ_SEARCH),
        (DOCKERS, None, 61184, None),
        (DOCKERS, Path("/h"), None, None),
        (0, None, None, None),
    ],
)
def test_root_becomes_another_user_wholly_or_not_at_all(
    rights: int,
    closed: Path | None,
    uid: int | None,
    keep: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stage, "capabilities", lambda: rights)
    monkeypatch.setattr(confine, "closed_path", lambda _paths, roots: closed)
    steps = confine.stage_steps(Level.NONE, View(), Limits(), 61184)
    assert (steps["uid"], steps["keep"]) == (uid, keep)
    assert rights >> CAP_SETUID & rights >> CAP_SETGID & 1 or uid is None


def test_a_container_leaves_one_right_to_read_what_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading_rights = []
    for rights, abi in ((ALL_RIGHTS, 2), (DOCKERS, 7), (DOCKERS, 2), (0, 7)):
        monkeypatch.setattr(confine, "capabilities", lambda rights=rights: rights)
        monkeypatch.setattr(confine, "landlock_abi", lambda abi=abi: abi)
        reading_rights.append(confine._reading_right())
    assert reading_rights == [CAP_DAC_READ_SEARCH, CAP_DAC_OVERRIDE, None, None]


def completed(launch: Launch) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        launch.command,
        env=launch.environment,
        cwd=launch.working,
        capture_output=True,
        timeout=240,
        text=True,
    )


def bound(view: View, *python: Path) -> list[str]:
    return bwrap_command(["true"], view._replace(read=(*python, *view.read)))


@pytest.fixture(autouse=True)
def bwrap(monkeypatch: pytest.MonkeyPatch) -> None:
    program = namespaces.find_bwrap() or Path("bwrap")
    monkeypatch.setattr(namespaces, "find_bwrap", lambda: program)


def words_after(line: list[str], option: str) -> list[str]:
    return [line[number + 1] for number, word in enumerate(line) if word == option]


def test_every_parent_is_made_open_and_a_folder_in_a_shown_one_is_not_bound_again(
    tmp_path: Path,
) -> None:
    inner = tmp_path / "project" / "inner"
    inner.mkdir(parents=True)
    line = bound(View(read=(inner, tmp_path / "project", tmp_path / "absent")))
    assert words_after(line, "--ro-bind") == ["/usr", str(tmp_path / "project")]
    assert str(tmp_path) in words_after(line, "--dir")
    at = line.index(str(tmp_path))
    assert line[at - 3 : at] == ["--perms", "0755", "--dir"]
    assert line[-3:] == ["--remount-ro", "/", "true"]


def test_what_is_hidden_in_a_shown_folder_can_hold_a_shown_one(tmp_path: Path) -> None:
    python = tmp_path / ".pixi" / "python"
    python.mkdir(parents=True)
    (tmp_path / ".env").write_text("SECRET=1")
    line = bound(
        View(
            read=(tmp_path,), hidden=(tmp_path / ".pixi", tmp_path / ".env", Path("/elsewhere"))
        ),
        python,
    )
    order = [line.index(word) for word in (str(tmp_path), str(tmp_path / ".pixi"), str(python))]
    assert order == sorted(order)
    assert line[line.index(str(tmp_path / ".env")) - 1] == os.devnull
    assert line.index("--remount-ro", order[-1]) > order[-1] and "/elsewhere" not in line


@linux
def test_a_run_behind_a_link_is_hidden_and_what_is_to_be_read_behind_one_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`runs` leads to another disk, `inside` into the project, and an output is a link itself."""
    if (reason := level_refusal(Level.NAMESPACES)) is not None:
        pytest.skip(reason)
    project, disk, data = (tmp_path / name for name in ("project", "disk", "data"))
    for folder in (project / "own" / "run", disk / "run", data):
        folder.mkdir(parents=True)
        (folder / "journal").write_text("canary")
    for name, target in {
        "runs": disk,
        "inside": project / "own",
        "output": disk / "run",
        "data": data,
        ".env": disk / "run" / "journal",
    }.items():
        (project / name).symlink_to(target)
    monkeypatch.chdir(project)
    source = "import glob; print(sorted(glob.glob('*/journal') + glob.glob('*/*/journal') + glob.glob('.e*')))"
    for run in ("runs/run", "inside/run", "output"):
        confinement = user_code_confinement(
            ["numbers:mean"], read=["data"], network=False, gpu=False, level="namespaces", memory_gib=1.0,
            run_folder=Path(run), run_id="x",
        )  # fmt: skip
        launch = confined_launch("timeit", ["-n1", "-r1", source], confinement)
        done = subprocess.run(
            launch.command, env=launch.environment, cwd=launch.working, capture_output=True, text=True, timeout=240
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        seen = done.stdout.splitlines()[0]
        assert "data/journal" in seen and "runs" not in seen and "output" not in seen
        assert ("own/run/journal" in seen) == (run != "inside/run")


FILES = """
import os
num_files = 0
for folder in ("/tmp", "/dev/shm"):
    for number in range(300):
        try:
            open(f"{folder}/{number}", "x").close()
        except OSError:
            break
        num_files += 1
print(num_files)
"""


@linux
def test_shared_memory_is_part_of_the_limit_of_files() -> None:
    if (reason := level_refusal(Level.NAMESPACES)) is not None:
        pytest.skip(reason)
    limits = Limits(files=160, scratch=8 * 2**20, memory=2**30)
    confinement = Confinement(Level.NAMESPACES, "x", limits=limits)
    launch = confined_launch("timeit", ["-n1", "-r1", FILES], confinement)
    done = subprocess.run(
        launch.command, env=launch.environment, capture_output=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert 140 <= int(done.stdout.splitlines()[0]) <= 160


def test_a_server_of_programs_has_a_proc_and_a_device_its_drivers_files() -> None:
    assert "--proc" not in bound(View()) and "--unshare-net" in bound(View())
    assert "--unshare-net" not in bound(View(network=True))
    assert "--proc" in bound(View(devices=True)) and "/sys" in bound(View(devices=True))


def test_a_recipe_may_show_a_folder_of_which_some_files_are_always_there() -> None:
    line = " ".join(bound(View(read=(Path("/etc"),))))
    assert "--ro-bind /etc /etc" in line


@linux
@pytest.mark.parametrize("level", [Level.NAMESPACES, Level.LANDLOCK])
def test_a_process_with_the_network_can_look_up_names_and_reads_no_key(level: Level) -> None:
    if (reason := level_refusal(level)) is not None:
        pytest.skip(reason)
    source = "\n".join(
        [
            "import os, socket",
            "open('/etc/hosts').read()",
            "socket.getaddrinfo('localhost', 80)",
            "try: keys = os.listdir('/etc/ssl/private')",
            "except OSError: keys = None",
            "print(keys)",
        ]
    )
    confinement = Confinement(level, "x", View(network=True))
    launch = confined_launch("timeit", ["-n1", "-r1", source], confinement)
    done = completed(launch)
    launch.clear()
    assert (done.returncode, done.stdout.splitlines()[:1]) == (0, ["None"]), done.stderr


@linux
@pytest.mark.parametrize("level", [Level.NAMESPACES, Level.LANDLOCK])
def test_a_launch_runs_a_module_and_removes_its_scratch(level: Level) -> None:
    if (reason := level_refusal(level)) is not None:
        pytest.skip(reason)
    launch = confined_launch("timeit", ["-n1", "-r1", "print(6*7)"], Confinement(level, "x"))
    done = completed(launch)
    assert done.returncode == 0 and done.stdout.startswith("42\n"), done.stderr
    launch.clear()
    assert launch.scratch is None or not launch.scratch.exists()
