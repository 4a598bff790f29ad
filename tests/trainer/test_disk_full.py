"""A disk that is full: the last checkpoint is whole, one line says so, and with room the run goes on exactly.

The disk is a small tmpfs where the tests may mount one, and else a limit on the size of a file, which ends a write in
the middle just so.
"""

import errno
import json
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from tests.tiny_model import write_tiny_model
from ycore.config.schema import RunConfig
from ycore.errors import Interrupted, RunError
from ycore.round.assemble import assemble
from ycore.run.files import RunFolder, is_disk_full, write_json_atomic
from ycore.run.metrics import read_metrics
from ycore.run.resuming import checkpoint_problem, checkpoints_in, size_of
from ycore.trainer import __main__ as main
from ycore.trainer.rollout_run import RolloutRun

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 4
REWARD = """
def variety(prompts, completions, **columns):
    return [len(set(completion[0]["content"])) / 8 for completion in completions]
"""


class Disk:
    """A place that can be filled, and emptied again."""

    def __init__(self, place: Path, *, is_mounted: bool) -> None:
        self.place = place
        self._is_mounted = is_mounted
        self._limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self, *, leave: int) -> None:
        if not self._is_mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (leave, self._limit[1]))
            return
        with (self.place / "filler").open("wb") as filler:
            filler.write(b"\0" * max(0, shutil.disk_usage(self.place).free - leave))

    def make_room(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limit)
        (self.place / "filler").unlink(missing_ok=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(place)]
    is_mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    disk = Disk(place, is_mounted=is_mounted)
    try:
        yield disk
    finally:
        disk.make_room()
        if is_mounted:
            subprocess.run(["umount", "-l", str(place)], check=True)


class FillsAfter(TrainerCallback):
    """Fills the disk after a step, before its checkpoint is written."""

    def __init__(self, disk: Disk, *, step: int, leave: Callable[[], int]) -> None:
        self._disk, self._step, self._leave = disk, step, leave

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            self._disk.fill(leave=self._leave())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def make(place: Path, model: Path) -> RunFolder:
    (place / "rewards.py").write_text(REWARD)
    (place / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n} + 1 ="}) + "\n" for n in range(8))
    )
    folder = RunFolder(place / "run")
    for path in (folder.root, folder.logs, folder.checkpoints):
        path.mkdir()
    settings = {
        "model": str(model),
        "dataset": str(place / "rows.jsonl"),
        "rewards": [{"reward": f"{place / 'rewards.py'}:variety"}],
        "output": str(folder.root),
        "prompts_per_step": 2,
        "group_size": 4,
        "max_tokens": 8,
        "steps": STEPS,
        "checkpoint_every": 1,
        "dtype": "float32",
        "engine": {"kind": "transformers"},
        "reward_workers": {"workers": 1},
        "trl": {"learning_rate": 1e-2},
    }
    config = RunConfig.model_validate(settings)
    write_json_atomic(folder.config, {"config": config.model_dump(mode="json")})
    engines = {"kind": "transformers", "engines": [], "model": str(model), "max_model_len": 64}
    write_json_atomic(folder.root / "engines.json", engines)
    return folder


@contextmanager
def training(folder: RunFolder, *callbacks: TrainerCallback) -> Iterator[RolloutRun]:
    run = RolloutRun(assemble(folder.root))
    for callback in callbacks:
        run.trainer.add_callback(callback)
    try:
        yield run
    finally:
        run.close()


@pytest.mark.parametrize(
    "looks_first", [True, False], ids=["seen before", "in the middle of a save"]
)
def test_a_full_disk_leaves_the_last_checkpoint_whole(
    looks_first: bool, disk: Disk, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not looks_first:
        monkeypatch.setattr("ycore.run.resuming._SPARE", 0)
    folder = make(disk.place, model)
    half = FillsAfter(
        disk, step=3, leave=lambda: size_of(checkpoints_in(folder.checkpoints)[-1]) // 2
    )
    said = r"no room for the checkpoint of step 3 .*; checkpoint-2 is whole: make room, and go on with --resume"
    with training(folder, half) as run, pytest.raises(RunError, match=said) as error:
        run.train()
    assert "\n" not in str(error.value) and error.value.exit_code == 1
    disk.make_room()
    names = sorted(path.name for path in folder.checkpoints.iterdir() if path.is_dir())
    assert names == ["checkpoint-1", "checkpoint-2"], "nothing is left of the save that failed"
    assert all(checkpoint_problem(path) is None for path in checkpoints_in(folder.checkpoints))
    with training(folder) as run:
        run.train()
    assert [row["step"] for row in read_metrics(folder.metrics)] == [1, 2, 3, 4]


def test_a_checkpoint_that_fails_after_ctrl_c_is_no_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stopped:
        def train(self) -> None:
            raise Interrupted("stopped after step 3")

        def save_checkpoint(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            pass

    monkeypatch.setattr(main, "open_run", lambda root: Stopped())
    monkeypatch.setattr(main, "on_stop", lambda ask: None)
    assert main._train(RunFolder(tmp_path), lambda error: None) == 1
    assert "failed: no room left on the disk" in capsys.readouterr().err


def test_no_room_for_the_journal_is_known_as_such(disk: Disk, model: Path) -> None:
    folder = make(disk.place, model)
    with (
        training(folder, FillsAfter(disk, step=2, leave=lambda: 0)) as run,
        pytest.raises((OSError, RunError)) as error,
    ):
        run.trainer.args.save_steps = 100
        run.train()
    disk.make_room()
    assert is_disk_full(error.value) or "no room" in str(error.value)
    assert not list(folder.journal.glob(".*"))
