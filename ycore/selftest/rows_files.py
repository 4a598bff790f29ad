"""Rows: checkpoints and rounds that are damaged, resume from every checkpoint, and the order of flushes.

Not here: kills while files are being written (`rows_save`).
"""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ycore.errors import RunError
from ycore.run.resuming import round_file
from ycore.selftest.bench import Bench, Row, row_of
from ycore.selftest.comparison import Difference, compare, read_result
from ycore.selftest.flushes import VARIABLE, read_flushes
from ycore.selftest.manifests import published
from ycore.selftest.oracle import Oracle, whole_run
from ycore.selftest.runs import Run, Setting, leftovers
from ycore.selftest.trial import Outcome, kill, resume_words

Damage = Callable[[Path], None]
_FULL = 30


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """One bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def delete(path: Path) -> None:
    path.unlink()


DAMAGES: dict[str, Damage] = {"truncated": truncate, "flipped": flip, "emptied": empty, "deleted": delete}


@dataclass(frozen=True, slots=True)
class Going:
    """How a stopped run's copy went on."""

    status: int | None
    difference: Difference
    left: tuple[str, ...]
    said: str


def stopped_run(oracle: Oracle, setting: Setting, name: str, *, after: int) -> Path:
    """A run that was killed in the step after that many, as soon as its round was committed: it is needed to go on."""
    output = setting.place / name
    run = Run(setting, oracle.job.words(output), output)
    committed = round_file(run.folder.journal, after, 0)
    try:
        landed = run.wait_for(committed.is_file, timeout_s=oracle.limit_s) and kill("trainer")(run)
        run.wait(timeout_s=oracle.limit_s)
        leftovers(run)
    finally:
        run.end()
    if not landed or len(published(run.folder.checkpoints)) < 2:
        raise RunError(f"the selftest found no run to damage: {run.tail(1)} (see {run.log})")
    return output


def go_on(oracle: Oracle, setting: Setting, output: Path, *more: str) -> Going:
    """Resume in a folder, and compare what came of it."""
    run = Run(setting, [*resume_words(oracle.job, output), *more], output)
    try:
        status = run.wait(timeout_s=oracle.limit_s)
        left = tuple(leftovers(run)) if status is not None else ("the run itself",)
    finally:
        run.end()
    return Going(status, compare(oracle.result, read_result(run.folder)), left, run.log.read_text(errors="replace"))


def damaged_row(bench: Bench) -> Row:
    """Every file of the newest checkpoint, damaged in every way: named, passed over, and nothing differs."""
    oracle = bench.oracle()
    base = stopped_run(oracle, bench.setting, "stopped", after=bench.job.steps - 2)
    files = sorted(path.name for path in published(base / "checkpoints")[-1].iterdir())
    cases = [(file, how) for file in files for how in DAMAGES]
    if bench.count < _FULL:
        cases = random.Random(f"damage/{bench.seed}").sample(cases, min(len(cases), bench.count))
    outcomes = bench.all(lambda case: damage_checkpoint(oracle, bench.setting, base, *case), cases)
    return row_of("damaged-checkpoint", "a file of the newest checkpoint damaged: named and passed over", outcomes)


def damage_checkpoint(oracle: Oracle, setting: Setting, base: Path, file: str, how: str) -> Outcome:
    """One damage in a copy of a stopped run; a note where the run does not say what it passed over."""
    output = _copy(base, setting.place / f"{how}-{file}")
    newest = published(output / "checkpoints")[-1]
    DAMAGES[how](newest / file)
    going = go_on(oracle, setting, output)
    notes = () if f"{newest.name} is damaged" in going.said else (f"{newest.name} is not said to be damaged",)
    difference = replace(going.difference, notes=(*going.difference.notes, *notes))
    return Outcome(output.name, (going.status,), difference, left=going.left, said=_last(going.said))


def damaged_round_row(bench: Bench) -> Row:
    """The newest committed round, damaged: refused and named; removed, it is made again."""
    oracle = bench.oracle()
    base = stopped_run(oracle, bench.setting, "stopped-with-rounds", after=bench.job.steps - 2)
    cases = [how for how in DAMAGES if how != "deleted"]
    outcomes = bench.all(lambda how: damage_round(oracle, bench.setting, base, how), cases)
    return row_of("damaged-round", "a committed round damaged: refused by name; without it, equal", outcomes)


def damage_round(oracle: Oracle, setting: Setting, base: Path, how: str) -> Outcome:
    output = _copy(base, setting.place / f"{how}-round-of-{base.name}")
    newest = sorted((output / "journal").glob("round-*"))[-1]
    DAMAGES[how](newest)
    refused = go_on(oracle, setting, output)
    if refused.status == 0:
        difference = replace(refused.difference, notes=(*refused.difference.notes, "a damaged round was taken"))
        return Outcome(output.name, (0,), difference, left=refused.left)
    notes = () if newest.name in refused.said else (f"{newest.name} is not named",)
    newest.unlink(missing_ok=True)
    going = go_on(oracle, setting, output)
    difference = replace(going.difference, notes=(*going.difference.notes, *notes))
    left = (*refused.left, *going.left)
    return Outcome(output.name, (refused.status, going.status), difference, left=left, said=_last(going.said))


def resume_row(bench: Bench) -> Row:
    """From every checkpoint of a whole run: with the journal, and with its later rounds made again."""
    kept = replace(bench.job, more=(*bench.job.more, "--save-total-limit", "100"))
    oracle = replace(bench.oracle(), job=kept)  # which changes nothing of the result
    whole, _ = whole_run(kept, bench.setting, name="whole-with-checkpoints")
    steps = [int(path.name.rpartition("-")[2]) for path in published(whole.checkpoints)]
    cases = [(step, replays) for step in steps if step < kept.steps for replays in (True, False)]

    def one(case: tuple[int, bool]) -> Outcome:
        step, replays = case
        output = _copy(whole.root, bench.place / f"from-{step}-{'replayed' if replays else 'anew'}")
        shutil.rmtree(output / "model")
        if not replays:
            for path in (output / "journal").glob("round-*"):
                if int(path.name.split("-")[1]) >= step:
                    path.unlink()
        going = go_on(oracle, bench.setting, output, "--resume-from", str(step))
        return Outcome(output.name, (going.status,), going.difference, left=going.left, said=_last(going.said))

    return row_of("resume-every", "resume from every checkpoint, rounds replayed and made anew", bench.all(one, cases))


def flush_row(bench: Bench) -> Row:
    """Of all runs so far: every round and every checkpoint was flushed before it got its name."""
    log = Path(bench.setting.environment[VARIABLE])
    bench.oracle()
    num_flushed, others = read_flushes(log)
    return Row(
        "flushes",
        "rounds and checkpoints flushed before their rename",
        num_flushed,
        num_flushed + len(others),
        failures=tuple(others),
    )


def _copy(base: Path, place: Path) -> Path:
    shutil.copytree(base, place, ignore=shutil.ignore_patterns("sockets", "weights"))
    return place


def _last(said: str) -> str:
    return said.strip().rpartition("\n")[2]
