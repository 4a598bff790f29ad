"""Checkpoints on disk: whatever happens to their files, what is chosen is whole, and what is not is named."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ycore.errors import RunFolderError
from ycore.run import resuming
from ycore.run.files import RunFolder, seal
from ycore.run.resuming import (
    CheckpointWriter,
    checkpoint_of,
    checkpoint_problem,
    checkpoints_in,
    clear_leftovers,
    drop_oldest,
    newest_whole,
    publish,
    read_checkpoint_manifest,
    set_aside_after,
    staging,
    step_of,
)
from ycore.view.activity import Activity, Scene, read_work

FILES = {
    "adapter_model.safetensors": b"w" * 5000,
    "optimizer.pt": b"o" * 9000,
    "inner/zero.pt": b"z" * 100,
    "trainer_state.json": b"{}",
    "rng_state.pth": b"r",
}


def save(folder: Path, step: int) -> Path:
    """Save a checkpoint as a trainer does, in small."""
    staged = staging(folder, step) / f"checkpoint-{step}"
    for name, data in FILES.items():
        (staged / name).parent.mkdir(parents=True, exist_ok=True)
        (staged / name).write_bytes(data + str(step).encode())
    return publish(folder, step, world=1)


def steps(folder: Path) -> list[int]:
    return [step_of(path) for path in checkpoints_in(folder)]


def test_a_published_checkpoint_verifies_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    saved = save(tmp_path, 3)
    assert checkpoint_problem(saved) is None
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]
    manifest = read_checkpoint_manifest(saved)
    assert (manifest.step, manifest.world, set(manifest.files)) == (3, 1, set(FILES))
    assert manifest.files["optimizer.pt"].bytes == 9001


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def wrong_step(path: Path) -> None:
    shutil.copy(path.parent.with_name("checkpoint-4") / path.name, path)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda path: os.truncate(path, 1), "bytes, "),
    "one bit": (flip, "has changed"),
    "gone": (lambda path: path.unlink(), "missing"),
    "empty": (lambda path: path.write_bytes(b""), "has 0 bytes"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_to_every_file_is_found_named_and_passed_over(
    tmp_path: Path, name: str, damage: str
) -> None:
    for step in (2, 4, 6):
        save(tmp_path, step)
    hurt, said = DAMAGES[damage]
    hurt(checkpoint_of(tmp_path, 6) / name)
    lines: list[str] = []
    assert newest_whole(tmp_path, say=lines.append) == 4
    (line,) = lines
    assert line.startswith("checkpoint-6 is damaged (") and name in line and said in line
    assert line.endswith("kept as damaged-checkpoint-6")
    assert (tmp_path / "damaged-checkpoint-6").is_dir() and steps(tmp_path) == [2, 4]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda manifest: manifest.unlink(), "manifest.json is missing, which is written last"),
        (lambda manifest: manifest.write_text("{"), "its first line is not JSON"),
        (lambda manifest: manifest.write_text("[]"), "its schema is not 2"),
        (lambda manifest: wrong_step(manifest), "its manifest is of step 4"),
    ],
    ids=["gone", "cut", "another schema", "another step"],
)
def test_damage_to_the_manifest_too(
    tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    save(tmp_path, 4)
    damage(save(tmp_path, 6) / "manifest.json")
    lines: list[str] = []
    assert newest_whole(tmp_path, say=lines.append) == 4
    assert said in lines[0]


def test_a_run_of_which_every_checkpoint_is_damaged_does_not_begin_again_by_itself(
    tmp_path: Path,
) -> None:
    assert newest_whole(tmp_path, say=print) == 0
    for step in (2, 4):
        flip(save(tmp_path, step) / "optimizer.pt")
    with pytest.raises(RunFolderError, match=r"no checkpoint .* verifies .*--resume-from 0"):
        newest_whole(tmp_path, say=print)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "damaged-checkpoint-2",
        "damaged-checkpoint-4",
    ]


@pytest.mark.parametrize(
    ("keep", "left"), [(None, [1, 2, 3, 4]), (3, [2, 3, 4]), (2, [3, 4]), (1, [3, 4])]
)
def test_two_are_always_kept(tmp_path: Path, keep: int | None, left: list[int]) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    drop_oldest(tmp_path, keep=keep)
    assert steps(tmp_path) == left


def test_what_a_killed_save_or_removal_left_is_cleared(tmp_path: Path) -> None:
    save(tmp_path, 2)
    (staging(tmp_path, 4) / "checkpoint-4").mkdir(parents=True)
    (tmp_path / ".dropping-checkpoint-1").mkdir()
    clear_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


def test_later_checkpoints_can_be_set_aside(tmp_path: Path) -> None:
    for step in (2, 4, 6, 10):
        save(tmp_path, step)
    assert [path.name for path in set_aside_after(tmp_path, 4)] == [
        "aside-checkpoint-6",
        "aside-checkpoint-10",
    ]
    assert steps(tmp_path) == [2, 4]
    save(tmp_path, 6)
    assert [path.name for path in set_aside_after(tmp_path, 4)] == ["aside-checkpoint-6-2"]


def test_a_second_save_of_a_step_takes_the_place_of_the_first(tmp_path: Path) -> None:
    first = save(tmp_path, 2)
    flip(first / "optimizer.pt")
    assert checkpoint_problem(save(tmp_path, 2)) is None
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


def test_a_save_says_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = RunFolder(tmp_path)
    monkeypatch.setattr("ycore.run.work._board", home.work)
    home.metrics.touch()
    writer = CheckpointWriter(home, expected_bytes=1, keep=2)
    with writer.saving(2) as staged:
        (staged / "checkpoint-2").mkdir()
        (staged / "checkpoint-2" / "trainer_state.json").write_text("{}")
        work = read_work(home.work)
        assert work is not None and work.words == "saving a checkpoint"
        scene = Scene(Activity(), 9.0, False, step_began=1.0, step_ended=2.0, work=work)
        assert scene.now().startswith("saving a checkpoint for ")
    assert read_work(home.work) is None


WRITER = """
import itertools
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_checkpoints import save
from ycore.run.resuming import drop_oldest
first = int(sys.argv[2]) + 1
for step in itertools.count(first):
    save(Path(sys.argv[1]), step)
    drop_oldest(Path(sys.argv[1]), keep=2)
    if step == first + 1:
        print("ready", flush=True)
"""


def test_killed_at_any_moment_of_a_save_the_newest_checkpoint_verifies(tmp_path: Path) -> None:
    """Saves follow each other, killed at random moments after the second: two whole ones are there at every instant."""
    moments, last, half = random.Random(5), 0, 0
    for _ in range(12):
        code = WRITER.format(tests=str(Path(__file__).parent))
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), str(last)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(moments.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        process.stdout.close()
        whole = [path for path in checkpoints_in(tmp_path) if checkpoint_problem(path) is None]
        assert whole == checkpoints_in(tmp_path) and len(whole) >= 2
        half += len([*tmp_path.glob(".*")])
        clear_leftovers(tmp_path)
        newest = newest_whole(tmp_path, say=print)
        assert newest > last
        last = newest
    assert half > 0, "no kill landed in a save"


def test_a_write_that_fails_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 2)

    def no_room(path: Path, value: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(resuming, "write_bytes_atomic", no_room)
        save(tmp_path, 4)
    assert steps(tmp_path) == [2]
    shutil.rmtree(staging(tmp_path, 4))
    assert read_checkpoint_manifest(save(tmp_path, 4)).step == 4


def manifest_of(tmp_path: Path, **changes: Any) -> Path:
    """A checkpoint whose manifest is sealed anew with other content."""
    saved = save(tmp_path, 6)
    content = {**json.loads((saved / "manifest.json").read_bytes().splitlines()[1]), **changes}
    (saved / "manifest.json").write_bytes(seal({"schema": 2}, content))
    return saved


def test_every_flipped_bit_of_a_manifest_is_found_and_named_in_one_line(tmp_path: Path) -> None:
    saved = save(tmp_path, 6)
    whole = (saved / "manifest.json").read_bytes()
    for bit in range(8 * len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        (saved / "manifest.json").write_bytes(data)
        problem = checkpoint_problem(saved)
        assert (
            problem is not None
            and problem.startswith("manifest.json is damaged (")
            and "\n" not in problem
        ), bit
    (saved / "manifest.json").write_bytes(whole)
    assert checkpoint_problem(saved) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"files": {}}, "lists no trainer_state.json, without which no run goes on"),
        ({"world": None}, "is damaged (world: "),
        ({"world": 0}, "is damaged (world: "),
        ({"world": 2}, "lists no rng_state_0.pth"),
        ({"step": True}, "is damaged (step: "),
        ({"files": {"a": {"bytes": "1", "sha256": "0" * 64}}}, "is damaged (files.a.bytes: "),
        ({"files": {"a": {"bytes": 1, "sha256": "0"}}}, "is damaged (files.a.sha256: "),
    ],
)
def test_a_manifest_that_says_too_little_is_no_manifest(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    problem = checkpoint_problem(manifest_of(tmp_path, **changes))
    assert problem is not None and said in problem and "\n" not in problem


def test_weights_belong_to_every_checkpoint(tmp_path: Path) -> None:
    saved = save(tmp_path, 6)
    files = {
        name: read_checkpoint_manifest(saved).files[name].model_dump()
        for name in ("trainer_state.json", "rng_state.pth")
    }
    assert checkpoint_problem(manifest_of(tmp_path, files=files)) == (
        "manifest.json lists no weights, without which no run goes on"
    )
