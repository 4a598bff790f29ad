"""The package's writes to files are recorded one protocol at a time: no cut leaves what must not be."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from tests.chaos.power.disk import ORDERS, follow
from tests.chaos.power.recording import (
    Operation,
    build_recorder,
    read_log,
    recording_environment,
)
from ycore.errors import RunError

State = dict[str, bytes | None]

DEEDS = """
import sys
from pathlib import Path
from ycore.run.resuming import drop_oldest, publish, staging
from ycore.run.claim import claim
from ycore.run.files import sync, sync_tree, write_json_atomic
from ycore.run.metrics import MetricsWriter
from ycore.run.files import RunFolder
from ycore.run.resuming import drop_rounds, round_file, write_round
from ycore.config.schema import RewardConfig, RunConfig

root = Path.cwd()
journal = root / "changed" / "journal"
journal.mkdir(parents=True)
for step in range(4):
    write_round(round_file(journal, step, 0), {"step": step}, {"old": True})
sync_tree(root / "changed")
drop_rounds(journal, after=1)
write_json_atomic(root / "changed" / "run.json", {"new": True})

saved = root / "saved"
saved.mkdir()
sync(root)
for step in (2, 4, 6, 6):
    staged = staging(saved, step) / f"checkpoint-{step}"
    (staged / "inner" / "most").mkdir(parents=True)
    for name in ("trainer_state.json", "rng_state.pth", "model.safetensors", "inner/most/part"):
        (staged / name).write_text(f"{name} {step}")
    publish(saved, step, world=1)
    drop_oldest(saved, keep=2)

(root / "rows").mkdir()
sync(root)
writer = MetricsWriter(root / "rows" / "metrics.jsonl")
for step in range(1, 7):
    writer.write({"step": step})
    if step == 4:
        sync_tree(root / "rows")
writer.forget_after(4)

folder = RunFolder(root / "claimed")
def config(steps):
    return RunConfig(output=str(folder.root), model="m", dataset="d", rewards=[RewardConfig(reward="r")], steps=steps)
claim(folder, config(5), resume=False).release()
write_json_atomic(folder.summary, {"status": "finished"})
claim(folder, config(9), resume=True).release()
"""


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Operation]:
    place = tmp_path_factory.mktemp("protocols")
    try:
        library = build_recorder(place)
    except RunError as error:
        pytest.skip(str(error))
    root = place / "root"
    root.mkdir()
    environment = {**os.environ, **recording_environment(library, root, place / "log")}
    subprocess.run(
        [sys.executable, "-c", DEEDS], cwd=root, env=environment, check=True, timeout=400
    )
    return read_log(place / "log", root)


def states(operations: Sequence[Operation], *, of: str) -> Iterator[State]:
    """Yield states of one folder after every operation on it, many under each model; paths are relative to it."""
    disk, _ = follow(operations)
    for cut, operation in enumerate(operations):
        if not operation.path.startswith(of):
            continue
        for number in range(30):
            for order in ORDERS:
                state = disk.after(cut, order, random.Random(f"{cut}/{number}"))
                yield {
                    path.removeprefix(f"{of}/"): data
                    for path, data in state.items()
                    if path.startswith(f"{of}/")
                }


def test_rounds_that_changed_settings_drop_are_gone_before_the_settings_are_there(
    operations: Sequence[Operation],
) -> None:
    seen = set()
    for state in states(operations, of="changed"):
        rounds = {path for path in state if path.startswith("journal/round")}
        seen.add(("run.json" in state, len(rounds)))
    assert (True, 2) in seen and (False, 4) in seen
    assert {count for is_new, count in seen if is_new} == {2}


def test_half_a_checkpoint_never_has_a_checkpoints_name(
    operations: Sequence[Operation],
) -> None:
    """It has none while it is saved, nor while an older one, or one of the same step, is removed."""
    counts = set()
    for state in states(operations, of="saved"):
        names = {path.partition("/")[0] for path in state if path.startswith("checkpoint-")}
        for name in names:
            files = {
                path
                for path in state
                if path.startswith(f"{name}/") and state[path] is not None
            }
            assert len(files) == 5, (name, files)
            assert all(
                state[path] == f"{path.partition('/')[2]} {name[-1]}".encode()
                for path in files
                if path[-4:] != "json"
            )
        counts.add(len(names))
    assert counts >= {0, 1, 2}


def test_rows_up_to_the_checkpoint_are_kept_when_later_ones_are_forgotten(
    operations: Sequence[Operation],
) -> None:
    last = max(
        index
        for index, operation in enumerate(operations)
        if operation.path == "rows/metrics.jsonl" and operation.kind == "flush"
    )
    disk, _ = follow(operations)
    for cut in range(last, len(operations)):
        for number in range(30):
            for order in ORDERS:
                state = disk.after(cut, order, random.Random(f"{cut}/{number}"))
                lines = (state["rows/metrics.jsonl"] or b"").split(b"\n")
                assert [json.loads(line)["step"] for line in lines[:4]] == [1, 2, 3, 4]


def test_a_summary_is_gone_before_the_settings_promise_more_steps(
    operations: Sequence[Operation],
) -> None:
    seen = set()
    for state in states(operations, of="claimed"):
        if state.get("run.json"):
            steps = json.loads(state["run.json"] or b"")["config"]["steps"]
            seen.add((steps, "summary.json" in state))
    assert seen == {(5, False), (5, True), (9, False)}
