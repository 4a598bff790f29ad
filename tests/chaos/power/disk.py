"""A model of a disk whose power fails: every state that it allows after a prefix of a recording.

Files and folders are inodes. A write or a change of size belongs to its file, and stays for certain once that file is
flushed. A new name, a removed name or a rename belongs to its folder, and stays for certain once that folder is flushed
(of a rename: the folder of the new name; a rename is never half done). What was not flushed may be there or not:

- Of a file: each write is there, missing, zeros, or partly there by blocks of 4096 bytes; a size changed or not.
- `ordered`: names change in the order of the calls, as a journaling file system's log keeps them. A flushed folder
  brings all earlier changes of names along; of the others a beginning is kept.
- `independent`: every change of a name that was not flushed is kept or lost alone. No common file system is as weak.

In both, flushing a file does not flush its name, and data and names have no order between them.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tests.chaos.power.recording import Operation
from ycore.errors import RunError

Order = Literal["ordered", "independent"]
ORDERS: tuple[Order, ...] = ("ordered", "independent")
BLOCK = 4096
_NEVER = 1 << 60


@dataclass(slots=True)
class Change:
    """Changed names: `(folder, name, inode)`, None where the name is gone; operation `kept_from` flushed them."""

    index: int
    names: tuple[tuple[int, str, int | None], ...]
    kept_from: int = _NEVER
    kept_from_in_order: int = _NEVER


@dataclass(slots=True)
class Piece:
    """Bytes that a file gets at an offset, or its new size where `data` is None."""

    index: int
    offset: int
    data: bytes | None
    kept_from: int = _NEVER


class World:
    """The tree as the running processes see it: nothing is ever lost."""

    def __init__(self) -> None:
        self.folders: dict[int, dict[str, int]] = {0: {}}
        self.contents: dict[int, bytearray] = {}
        self._last = 0

    def new(self, *, is_folder: bool) -> int:
        self._last += 1
        if is_folder:
            self.folders[self._last] = {}
        else:
            self.contents[self._last] = bytearray()
        return self._last

    def find(self, path: str) -> int | None:
        """Return the inode of a path; None where there is none."""
        inode = 0
        for name in path.split("/") if path else []:
            child = self.folders.get(inode, {}).get(name)
            if child is None:
                return None
            inode = child
        return inode

    def place(self, path: str) -> tuple[int, str]:
        """Return the folder that holds a path, and the name in it."""
        above, _, name = path.rpartition("/")
        folder = self.find(above)
        if folder is None:
            raise RunError(f"the record has no folder for {path}")
        return folder, name

    def files(self, path: str = "") -> dict[str, bytes]:
        """Return every file below a path by its name there; of a file, itself under the name ""."""
        inode = self.find(path)
        if inode is None:
            return {}
        return {
            name: bytes(self.contents[number])
            for name, number in files_below(self.folders, inode).items()
        }


def files_below(
    folders: Mapping[int, Mapping[str, int]], inode: int, prefix: str = ""
) -> dict[str, int]:
    if inode not in folders:
        return {prefix: inode}
    files: dict[str, int] = {}
    for name, inner in folders[inode].items():
        files |= files_below(folders, inner, f"{prefix}/{name}" if prefix else name)
    return files


def write_at(content: bytearray, offset: int, data: bytes) -> None:
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


def set_size(content: bytearray, size: int) -> None:
    del content[size:]
    content.extend(bytes(size - len(content)))


@dataclass(slots=True)
class Disk:
    """All changes of a recording, and when each came to stay."""

    changes: list[Change] = field(default_factory=list)
    pieces: defaultdict[int, list[Piece]] = field(default_factory=lambda: defaultdict(list))
    folders: set[int] = field(default_factory=lambda: {0})
    _whole: dict[tuple[int, int], bytes] = field(default_factory=dict)

    def after(self, cut: int, order: Order, draw: random.Random) -> dict[str, bytes | None]:
        """Return a state that the disk may have when the power fails right after operation `cut`; None is a folder.

        Args:
            draw: chooses among what the model allows.
        """
        folders = self._names(cut, order, draw)
        state: dict[str, bytes | None] = {}
        keep = draw.choice((0.0, 0.5, 1.0, draw.random()))

        def walk(inode: int, path: str) -> None:
            if inode not in self.folders:
                state[path] = self._content(inode, cut, keep, draw)
                return
            if path:
                state[path] = None
            for name, inner in folders[inode].items():
                walk(inner, f"{path}/{name}" if path else name)

        walk(0, "")
        return state

    def _names(self, cut: int, order: Order, draw: random.Random) -> dict[int, dict[str, int]]:
        done = [change for change in self.changes if change.index <= cut]
        if order == "ordered":
            certain = sum(change.kept_from_in_order <= cut for change in done)
            kept = done[: draw.randint(certain, len(done))]
        else:
            keep = draw.choice((0.0, 0.1, 0.5, 0.9, 1.0))
            kept = [
                change for change in done if change.kept_from <= cut or draw.random() < keep
            ]
        folders: dict[int, dict[str, int]] = defaultdict(dict)
        for change in kept:
            for folder, name, inode in change.names:
                if inode is None:
                    folders[folder].pop(name, None)
                else:
                    folders[folder][name] = inode
        return folders

    def _content(self, inode: int, cut: int, keep: float, draw: random.Random) -> bytes:
        done = [piece for piece in self.pieces[inode] if piece.index <= cut]
        certain = sum(piece.kept_from <= cut for piece in done)
        if (inode, certain) not in self._whole:
            content = bytearray()
            for piece in done[:certain]:
                _apply(content, piece)
            self._whole[inode, certain] = bytes(content)
        if certain == len(done):
            return self._whole[inode, certain]
        content = bytearray(self._whole[inode, certain])
        for piece in done[certain:]:
            if draw.random() < keep:
                _apply(content, piece)
            elif piece.data is not None:
                _apply_partly(content, piece.offset, piece.data, draw)
        return bytes(content)


def _apply(content: bytearray, piece: Piece) -> None:
    if piece.data is None:
        set_size(content, piece.offset)
    else:
        write_at(content, piece.offset, piece.data)


def _apply_partly(content: bytearray, offset: int, data: bytes, draw: random.Random) -> None:
    """Apply it not at all, with zeros where the file grew, or by some of its blocks."""
    damage = draw.choice(("missing", "zeros", "blocks", "beginning"))
    if damage == "missing":
        return
    if damage == "beginning":
        write_at(content, offset, data[: draw.randint(0, len(data))])
        return
    size = max(len(content), offset + len(data))
    content.extend(bytes(size - len(content)))
    if damage == "zeros":
        return
    first = offset // BLOCK
    for block in range(first, (offset + len(data) - 1) // BLOCK + 1):
        begin, end = max(offset, block * BLOCK), min(offset + len(data), (block + 1) * BLOCK)
        if draw.random() < 0.5:
            content[begin:end] = data[begin - offset : end - offset]


Observe = Callable[[int, Operation, World], None]


def follow(
    operations: Sequence[Operation], observe: Observe | None = None
) -> tuple[Disk, World]:
    """Take every operation; `observe` sees the world after each."""
    disk, world = Disk(), World()
    for index, operation in enumerate(operations):
        if operation.kind == "flush":
            _flush(disk, world, index, operation)
        elif operation.kind in ("write", "size"):
            _change_content(disk, world, index, operation)
        else:
            _change_names(disk, world, index, operation)
        if observe is not None:
            observe(index, operation, world)
    return disk, world


def _flush(disk: Disk, world: World, index: int, operation: Operation) -> None:
    inode = world.find(operation.path)
    if inode is None:
        return  # above or beside what is recorded, or ignored
    if inode in world.contents:
        if len(world.contents[inode]) != operation.offset:
            seen = len(world.contents[inode])
            raise RunError(
                f"{operation.path} has {operation.offset} bytes at a flush, and {seen} were recorded"
            )
        for piece in reversed(disk.pieces[inode]):
            if piece.kept_from != _NEVER:
                break
            piece.kept_from = index
        return
    for change in disk.changes:
        if change.kept_from == _NEVER and change.names[-1][0] == inode:
            change.kept_from = index
    last = max(
        (place for place, change in enumerate(disk.changes) if change.names[-1][0] == inode),
        default=-1,
    )
    for change in disk.changes[: last + 1]:
        change.kept_from_in_order = min(change.kept_from_in_order, index)


def _change_content(disk: Disk, world: World, index: int, operation: Operation) -> None:
    inode = world.find(operation.path)
    if inode is None:
        raise RunError(f"the record writes to {operation.path}, and never made it")
    data = operation.data if operation.kind == "write" else None
    piece = Piece(index, operation.offset, data)
    disk.pieces[inode].append(piece)
    _apply(world.contents[inode], piece)


def _change_names(disk: Disk, world: World, index: int, operation: Operation) -> None:
    folder, name = world.place(operation.path)
    names: tuple[tuple[int, str, int | None], ...]
    match operation.kind:
        case "create" | "mkdir":
            inode = world.new(is_folder=operation.kind == "mkdir")
            if operation.kind == "mkdir":
                disk.folders.add(inode)
            names = ((folder, name, inode),)
        case "unlink" | "rmdir":
            names = ((folder, name, None),)
        case _:
            moved = world.find(operation.path)
            if moved is None:
                raise RunError(f"the record moves {operation.path}, and never made it")
            target = (*world.place(operation.other), moved)
            names = (target,) if operation.kind == "link" else ((folder, name, None), target)
    disk.changes.append(Change(index, names))
    for parent, entry, inode_or_none in names:
        if inode_or_none is None:
            world.folders[parent].pop(entry, None)
        else:
            world.folders[parent][entry] = inode_or_none
