"""Feeds inputs to a target and says what went wrong: an exception not of ycore's own, too much time or memory."""

import random
import resource
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.mutations import bit_flips
from tests.fuzz.targets import Target
from ycore.errors import YcoreError

LONGEST_S = 5.0  # of one input, all of which are small; a hundred times what the slowest takes
MORE_MEMORY = 2 << 30  # bytes of address space beyond what the process had at its start


@dataclass
class Outcome:
    tried: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    defects: dict[str, bytes] = field(default_factory=dict)
    """The first input of each, by where it was raised."""


def inputs(target: Target, *, seed: int, rounds: int) -> Iterator[bytes]:
    """The seeds as they are, every bit flip of the first where the target asks for it, and `rounds` mutations."""
    yield from target.seeds
    if target.flips:
        yield from bit_flips(target.seeds[0])
    for number in range(rounds):
        yield target.input(random.Random(f"{target.name}/{seed}/{number}"))


def attack(target: Target, data: Iterable[bytes]) -> Outcome:
    memory = Path("/dev/shm")  # where there is none, a disk
    outcome, root = Outcome(), Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    try:
        with limited_memory():
            for number, content in enumerate(data):
                place = root / str(number)
                place.mkdir()
                _try(target, content, place, outcome)
                shutil.rmtree(place, ignore_errors=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return outcome


def _try(target: Target, data: bytes, place: Path, outcome: Outcome) -> None:
    outcome.tried += 1
    began = time.process_time()
    try:
        target.read(data, place)
    except YcoreError as refusal:
        outcome.refused += 1
        if len(str(refusal)) > 20_000:
            outcome.defects.setdefault(f"a message of {len(str(refusal))} characters", data)
    except Exception as problem:  # noqa: BLE001, any of them is a find
        ours = [
            frame
            for frame in traceback.extract_tb(problem.__traceback__)
            if "ycore/" in frame.filename
        ]
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
        outcome.defects.setdefault(
            f"{type(problem).__name__} at {where}: {str(problem)[:100]!r}"[:200], data
        )
    taken = time.process_time() - began
    outcome.slowest_s = max(outcome.slowest_s, taken)
    if taken > LONGEST_S:
        outcome.defects.setdefault(f"took {taken:.0f} s", data)


@contextmanager
def limited_memory() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MORE_MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
