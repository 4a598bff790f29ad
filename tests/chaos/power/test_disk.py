"""The model of the disk: what it may lose, what it must keep, and that the recorder misses nothing."""

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.chaos.power.disk import ORDERS, Order, follow
from tests.chaos.power.proof import unlike
from tests.chaos.power.recording import (
    Operation,
    build_recorder,
    read_log,
    recording_environment,
)
from ycore.errors import RunError

NEW = b"new" * 3000


def op(
    kind: str, path: str, other: str = "", *, data: bytes = b"", offset: int = 0
) -> Operation:
    return Operation(kind, path, 1, other, offset, data)  # type: ignore[arg-type]


def replaced(*, file_is_flushed: bool, folder_is_flushed: bool) -> list[Operation]:
    """`a` is old and on the disk; a new one is written beside it and renamed over it."""
    return [
        op("create", "a"),
        op("write", "a", data=b"old"),
        op("flush", "a", offset=3),
        op("flush", "", offset=-1),
        op("create", "b"),
        op("write", "b", data=NEW),
        *([op("flush", "b", offset=len(NEW))] if file_is_flushed else []),
        op("rename", "b", "a"),
        *([op("flush", "", offset=-1)] if folder_is_flushed else []),
    ]


def states(
    operations: Sequence[Operation], order: Order, *, times: int = 300
) -> list[dict[str, bytes | None]]:
    disk, _ = follow(operations)
    return [
        disk.after(len(operations) - 1, order, random.Random(number)) for number in range(times)
    ]


@pytest.mark.parametrize("order", ORDERS)
def test_a_file_flushed_renamed_and_its_folder_flushed_is_there(order: Order) -> None:
    for state in states(replaced(file_is_flushed=True, folder_is_flushed=True), order):
        assert state == {"a": NEW}


@pytest.mark.parametrize("order", ORDERS)
def test_without_the_folders_flush_it_is_the_old_or_the_new_one(order: Order) -> None:
    contents = {
        bytes(state["a"] or b"")
        for state in states(replaced(file_is_flushed=True, folder_is_flushed=False), order)
    }
    assert contents == {b"old", NEW}


@pytest.mark.parametrize("order", ORDERS)
def test_without_the_files_flush_a_renamed_file_may_be_empty_zeros_or_half(
    order: Order,
) -> None:
    contents = {
        bytes(state["a"] or b"")
        for state in states(replaced(file_is_flushed=False, folder_is_flushed=True), order)
    }
    assert (
        {b"", NEW, bytes(len(NEW))} <= contents
        and len(contents) > 10
        and b"old" not in contents
    )


def test_names_are_lost_in_order_or_each_by_itself() -> None:
    made = [op("mkdir", "d"), op("create", "d/1"), op("create", "d/2")]
    in_order = {tuple(sorted(state)) for state in states(made, "ordered")}
    assert in_order == {(), ("d",), ("d", "d/1"), ("d", "d/1", "d/2")}
    alone = {tuple(sorted(state)) for state in states(made, "independent")}
    assert alone == in_order | {("d", "d/2")}


def test_a_flushed_folder_brings_earlier_names_along_only_where_they_have_an_order() -> None:
    made = [
        op("mkdir", "c"),
        op("mkdir", "d"),
        op("create", "d/1"),
        op("flush", "d", offset=-1),
    ]
    assert {tuple(sorted(state)) for state in states(made, "ordered")} == {("c", "d", "d/1")}
    assert {tuple(sorted(state)) for state in states(made, "independent")} == {
        (), ("c",), ("d", "d/1"), ("c", "d", "d/1")
    }  # fmt: skip


def test_a_write_that_went_unseen_is_noticed() -> None:
    with pytest.raises(RunError, match="a has 4 bytes at a flush, and 0 were recorded"):
        follow([op("create", "a"), op("flush", "a", offset=4)])


WRITER = """
import os, sys
from pathlib import Path
import numpy, shutil
from safetensors.numpy import save_file
root = Path(sys.argv[1])
os.chdir(root)
Path("sub/inner").mkdir(parents=True)
with open("sub/plain", "w") as file:
    file.write("one\\n")
    file.flush()
    os.fsync(file.fileno())
    file.write("two\\n")
with open("sub/plain", "a") as file:
    file.write("three\\n")
with open("sub/plain", "r+b") as file:
    file.seek(4)
    file.read(2)
    file.write(b"XX")
    file.truncate(12)
save_file({"a": numpy.arange(5000.0)}, "sub/inner/model.safetensors")
shutil.copy("sub/plain", "sub/copy")
os.replace("sub/copy", root / "moved")
os.link("moved", "linked")
folder = os.open("sub", os.O_RDONLY)
os.fsync(folder)
os.mkdir("late", dir_fd=folder)
os.rename("plain", "late/plain", src_dir_fd=folder, dst_dir_fd=folder)
Path("gone/deep").mkdir(parents=True)
Path("gone/deep/file").write_bytes(b"x" * 100000)
shutil.rmtree("gone")
if len(sys.argv) == 2:
    import subprocess
    subprocess.run([sys.executable, "-c", sys.stdin.read(), str(root / "sub"), "again"], check=True)
"""


def test_the_recorder_sees_all_that_processes_do(tmp_path: Path) -> None:
    """Python's calls, those of Rust in safetensors, folders' descriptors, copies inside the kernel; two processes."""
    try:
        library = build_recorder(tmp_path)
    except RunError as error:
        pytest.skip(str(error))
    root, log = tmp_path / "root", tmp_path / "log"
    root.mkdir()
    environment = {**os.environ, **recording_environment(library, root, log)}
    subprocess.run(
        [sys.executable, "-c", WRITER, str(root)],
        input=WRITER,
        text=True,
        env=environment,
        check=True,
        timeout=240,
    )
    operations = read_log(log, root)
    _, world = follow(operations)
    assert unlike(world.files(), root) == []
    assert world.files()["sub/late/plain"] == b"one\ntwXXthre"
    assert {"late", "model.safetensors"} <= {path.name for path in (root / "sub").rglob("*")}
    assert len({operation.pid for operation in operations}) == 2
    assert {operation.kind for operation in operations} == {
        "create", "size", "write", "rename", "link", "unlink", "mkdir", "rmdir", "flush"
    }  # fmt: skip
