"""Ask the package what a resume would do with a disk's state after a loss of power, and check it by the promises."""

import contextlib
import hashlib
import io
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.power.disk import Disk, World, follow
from tests.chaos.power.recording import Operation, is_ignored
from tests.chaos.power.scenarios import RUN, Recording
from ycore.errors import YcoreError
from ycore.run.claim import AS_IT_WAS, check_claim, is_finished, stored_config
from ycore.run.files import LineFollower, RunFolder
from ycore.run.metrics import MetricsWriter, is_evaluation, read_metrics
from ycore.run.resuming import (
    checkpoint_of,
    newest_for,
    read_round,
    round_file,
    rounds_in,
    settle,
)
from ycore.run.trace import Mark, TraceWriter, new_events

State = Mapping[str, bytes | None]
Files = Mapping[str, str]


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def digests(files: Mapping[str, bytes]) -> Files:
    return {name: digest(data) for name, data in files.items()}


@dataclass(frozen=True, slots=True)
class Ending:
    """The run that a summary with `finished` stands for."""

    steps: int
    files: Files
    rows: Sequence[str]


@dataclass(slots=True)
class Promise:
    """A promise: its content must be there after every cut from operation `since` on, until it is taken back."""

    kind: str
    step: int
    content: str
    since: int
    until: int = 1 << 60


@dataclass(slots=True)
class Witness:
    """Notes what the processes saw: every version of everything that counts, and when it was promised.

    A promise begins with the next thing that the same process does, other than a flush: so it does not depend on
    whether a flush was made, which is what is being tested.
    """

    checkpoints: dict[int, list[Files]] = field(default_factory=lambda: defaultdict(list))
    journals: list[frozenset[tuple[int, str]]] = field(default_factory=list)
    """Step and content of all rounds that were there together."""

    rows: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    endings: dict[str, Ending] = field(default_factory=dict)
    descriptions: set[str] = field(default_factory=set)
    identities: set[str] = field(default_factory=set)
    promises: list[Promise] = field(default_factory=list)
    _pending: dict[int, list[Promise]] = field(default_factory=lambda: defaultdict(list))

    def observe(self, index: int, operation: Operation, world: World) -> None:
        """See each operation after it is done."""
        if operation.kind != "flush" and not operation.path.endswith("trace.json"):
            for promise in self._pending.pop(operation.pid, []):
                promise.since = index
                self.promises.append(promise)
        if operation.kind == "write" and operation.path.rpartition("/")[2].lstrip(
            "."
        ).startswith("metrics.jsonl"):
            self._see_rows(operation.data)
        if operation.kind in ("rename", "unlink"):
            self._see_name(index, operation, world)

    def _see_rows(self, data: bytes) -> None:
        for line in data.splitlines():
            row = json.loads(line)
            self.rows[row["step"]].add(canonical(row))

    def _see_name(self, index: int, operation: Operation, world: World) -> None:
        place = operation.other or operation.path
        inner = place.removeprefix(f"{RUN}/")
        folder, _, name = inner.rpartition("/")
        if folder == "journal":
            self._see_round(index, operation, world, name)
        if operation.kind == "unlink":
            if inner == "summary.json":
                self._take_back("finished", index)
            return
        if folder == "checkpoints" and name.startswith("checkpoint-"):
            step = int(name.rpartition("-")[2])
            self.checkpoints[step].append(digests(world.files(place)))
            self._promise(operation.pid, "checkpoint", step, "")
        elif inner in ("run.json", "identity.json"):
            seen = self.descriptions if inner == "run.json" else self.identities
            seen.add(digest(world.files(place)[""]))
            self._promise(operation.pid, inner, 0, "")
        elif inner == "summary.json":
            self._see_summary(operation, world)

    def _see_round(self, index: int, operation: Operation, world: World, name: str) -> None:
        rounds = {
            _step_of(key): digest(data)
            for key, data in world.files(f"{RUN}/journal").items()
            if key[0] != "."
        }
        self.journals.append(frozenset(rounds.items()))
        if not name.startswith("."):
            self._take_back("round", index, step=_step_of(name))
            if operation.kind == "rename":
                self._promise(operation.pid, "round", _step_of(name), rounds[_step_of(name)])

    def _see_summary(self, operation: Operation, world: World) -> None:
        data = world.files(f"{RUN}/summary.json")[""]
        summary = json.loads(data)
        if summary["status"] != "finished":
            return
        files = world.files(RUN)
        kept = {
            name: files[name] for name in files if name.startswith("model/") or name in _RESULTS
        }
        rows = [canonical(json.loads(line)) for line in files["metrics.jsonl"].splitlines()]
        self.endings[digest(data)] = Ending(summary["steps"], digests(kept), rows)
        self._promise(operation.pid, "finished", summary["steps"], "")

    def _promise(self, pid: int, kind: str, step: int, content: str) -> None:
        self._pending[pid].append(Promise(kind, step, content, 0))

    def _take_back(self, kind: str, index: int, *, step: int | None = None) -> None:
        for promise in self.promises:
            if promise.kind == kind and step in (None, promise.step):
                promise.until = min(promise.until, index)

    def promised(self, cut: int, kind: str) -> list[Promise]:
        return [
            promise
            for promise in self.promises
            if promise.kind == kind and promise.since <= cut < promise.until
        ]


_RESULTS = ("samples.json", "held_out.json")


def canonical(row: Mapping[str, Any]) -> str:
    return json.dumps(row, sort_keys=True)


def _step_of(round_name: str) -> int:
    return int(round_name.split("-")[1])


@dataclass(frozen=True, slots=True)
class Subject:
    """A recording with its disk and its witness."""

    recording: Recording
    disk: Disk
    witness: Witness


def subject_of(
    recording: Recording, operations: Sequence[Operation] | None = None
) -> tuple[Subject, World]:
    """Make a subject, and the world at its end, to compare with the real folder; `operations` replace its own."""
    witness = Witness()
    disk, world = follow(
        recording.operations if operations is None else operations, witness.observe
    )
    return Subject(recording, disk, witness), world


class Broken(Exception):
    """A state breaks a promise."""


def judge(subject: Subject, cut: int, state: State, root: Path) -> str:
    """Say how a run goes on from a state that lies in `root`, which is changed; Broken where it must not go on so.

    Returns:
        `begins` (nothing was promised yet), `finished`, `resumes`, or `names damage` and goes on from what is whole.
    """
    try:
        return _judge(subject, cut, state, RunFolder(root / RUN))
    except YcoreError as error:
        raise Broken(f"it is refused: {error}") from error
    except (Exception, RecursionError) as error:
        if isinstance(error, Broken):
            raise
        raise Broken(f"{type(error).__name__}: {error}") from error


def _judge(subject: Subject, cut: int, state: State, folder: RunFolder) -> str:
    witness, config = subject.witness, subject.recording.phase(cut).config
    if f"{RUN}/run.json" not in state:
        promised = [promise.kind for promise in witness.promises if promise.since <= cut]
        if promised:
            raise Broken(f"run.json is gone, and there had been {promised[-1]}")
        check_claim(folder, config, resume=None)
        return "begins"
    if digest(folder.config.read_bytes()) not in witness.descriptions:
        raise Broken("run.json is not what was written")
    stored_config(folder)
    if is_finished(folder):
        ending = _check_ending(witness, state)
        if ending.steps >= (config.steps or 0):
            return "finished"
    elif witness.promised(cut, "finished"):
        raise Broken("it was said to have finished, and the summary is gone")
    check_claim(folder, config, resume=AS_IT_WAS)
    lines: list[str] = []
    settle(folder, config, AS_IT_WAS, world=1, say=lines.append)
    step = newest_for(folder.checkpoints, world=1, say=lines.append)
    _check_checkpoint(witness, cut, folder, step)
    _check_rounds(witness, cut, folder, step)
    with contextlib.redirect_stderr(io.StringIO()) as warnings:
        _check_metrics(witness, folder, step)
    _check_rest(witness, cut, folder)
    said = "\n".join(lines) + warnings.getvalue()
    return "names damage" if "damaged" in said else "resumes"


def _check_ending(witness: Witness, state: State) -> Ending:
    def content(name: str) -> bytes:
        return state.get(f"{RUN}/{name}") or b""

    ending = witness.endings.get(digest(content("summary.json")))
    if ending is None:
        raise Broken("a summary that was never written says finished")
    model = {
        name.removeprefix(f"{RUN}/")
        for name, data in state.items()
        if data is not None and "/model/" in name
    }
    for name in sorted(ending.files.keys() | model):
        if digest(content(name)) != ending.files.get(name):
            raise Broken(f"it has finished, and {name} is not what was written")
    if [canonical(row) for row in rows_of(content("metrics.jsonl"))] != list(ending.rows):
        raise Broken("it has finished, and metrics.jsonl is not what was written")
    return ending


def rows_of(data: bytes) -> list[dict[str, Any]]:
    rows = []
    for line in data.splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            rows.append({})
    return rows


def _check_checkpoint(witness: Witness, cut: int, folder: RunFolder, step: int) -> None:
    promised = max((promise.step for promise in witness.promised(cut, "checkpoint")), default=0)
    if step < promised:
        raise Broken(f"it goes on from step {step}, and checkpoint-{promised} had been saved")
    if step:
        newest = checkpoint_of(folder.checkpoints, step)
        files = {
            str(path.relative_to(newest)): path.read_bytes()
            for path in newest.rglob("*")
            if path.is_file()
        }
        if digests(files) not in witness.checkpoints[step]:
            raise Broken(f"{newest.name} is taken, and is not what was written")


def _check_rounds(witness: Witness, cut: int, folder: RunFolder, step: int) -> None:
    """Check the rounds that a resume takes again: from the checkpoint on, until one is missing."""
    taken: set[tuple[int, str]] = set()
    for number in range(step, 1 << 30):
        path = round_file(folder.journal, number, 0)
        if not path.is_file():
            break
        read_round(path)
        taken.add((number, digest(path.read_bytes())))
    if taken and not any(taken <= together for together in witness.journals):
        raise Broken(
            f"rounds {sorted(number for number, _ in taken)} were never there together"
        )
    for promise in witness.promised(cut, "round"):
        if promise.step >= step and (promise.step, promise.content) not in taken:
            raise Broken(
                f"the round of step {promise.step} was committed and is gone, at step {step}"
            )
    rounds_in(folder.journal)


def _check_metrics(witness: Witness, folder: RunFolder, step: int) -> None:
    writer = MetricsWriter(folder.metrics)
    writer.forget_after(step)
    writer.close()
    rows = read_metrics(folder.metrics)
    steps = [row.get("step") for row in rows if not is_evaluation(row)]
    if steps != list(range(1, step + 1)):
        raise Broken(f"metrics.jsonl has steps {steps} at step {step}")
    for row in rows:
        if canonical(row) not in witness.rows[row["step"]]:
            raise Broken(f"metrics.jsonl has another row of step {row['step']}")


def _check_rest(witness: Witness, cut: int, folder: RunFolder) -> None:
    """Check who the run is, and that what nothing depends on does not stop it either."""
    if witness.promised(cut, "identity.json") and not folder.identity.is_file():
        raise Broken("identity.json is gone")
    if (
        folder.identity.is_file()
        and digest(folder.identity.read_bytes()) not in witness.identities
    ):
        raise Broken("identity.json is not what was written")
    for path in (folder.samples, folder.held_out, folder.engines):
        if path.is_file():
            json.loads(path.read_bytes())
    new_events(LineFollower(folder.trace))
    writer = TraceWriter(folder.trace)
    writer.add(Mark("round", 0, 1.0))
    writer.flush()
    new_events(LineFollower(folder.trace))


def put(state: State, root: Path, pool: Path) -> None:
    """Write a state into a new folder; files that are only read are links into `pool`, by their content."""
    root.mkdir(parents=True)
    for path, data in sorted(state.items()):
        place = root / path
        if data is None:
            place.mkdir()
        elif "/checkpoints/" in path and len(data) > 4096:
            kept = pool / digest(data)
            if not kept.is_file():
                kept.write_bytes(data)
            place.hardlink_to(kept)
        else:
            place.write_bytes(data)


def unlike(expected: Mapping[str, bytes], folder: Path) -> list[str]:
    """Name the files of a real folder that differ from what was recorded, or that only one of both has."""
    real = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    real = {name: path for name, path in real.items() if not is_ignored(name)}
    return [
        name
        for name in sorted(expected.keys() | real.keys())
        if name not in expected or name not in real or real[name].read_bytes() != expected[name]
    ]
