"""Rows: damaged checkpoints and rounds, resume from every checkpoint, the order of flushes, and kills inside a save.

The kills are only as good as their aim. So a writer that saves in place (a patched copy of the package that gives a
checkpoint its name before it is written) is killed in the same way, and must often be caught with broken checkpoints.
"""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil

from tests.chaos.bench import Bench, Row, row_of
from tests.chaos.patches import IN_PLACE, copy_package
from tests.chaos.results import (
    Difference,
    compare,
    compare_steps,
    newest_problem,
    published,
    read_result,
)
from tests.chaos.runs import Run, Setting, leftovers
from tests.chaos.trial import Oracle, Outcome, kill, resume_words, whole_run
from tests.chaos.witnesses import FLUSHES_VARIABLE, read_flushes
from ycore.errors import RunError
from ycore.run.resuming import round_file

Damage = Callable[[Path], None]
_FULL = 30


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """Flip one bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def delete(path: Path) -> None:
    path.unlink()


DAMAGES: dict[str, Damage] = {
    "truncated": truncate,
    "flipped": flip,
    "emptied": empty,
    "deleted": delete,
}


@dataclass(frozen=True, slots=True)
class Going:
    """How a stopped run's copy went on."""

    status: int | None
    difference: Difference
    left: tuple[str, ...]
    said: str


def stopped_run(oracle: Oracle, setting: Setting, name: str, *, after: int) -> Path:
    """Return a run that was killed in the step after that many, once its round, needed to go on, was committed."""
    output = setting.place / name
    run = Run(setting, oracle.job.words(output), output)
    committed = round_file(run.folder.journal, after, 0)
    try:
        landed = run.wait_for(committed.is_file, timeout_s=oracle.limit_s) and kill("trainer")(
            run
        )
        run.wait(timeout_s=oracle.limit_s)
        leftovers(run)
    finally:
        run.end()
    if not landed or len(published(run.folder.checkpoints)) < 2:
        raise RunError(f"there is no run to damage: {run.tail(1)} (see {run.log})")
    return output


def go_on(oracle: Oracle, setting: Setting, output: Path, *more: str) -> Going:
    """Resume in a folder, and compare what came of it."""
    run = Run(setting, [*resume_words(oracle.job, output), *more], output)
    try:
        status = run.wait(timeout_s=oracle.limit_s)
        left = tuple(leftovers(run)) if status is not None else ("the run itself",)
    finally:
        run.end()
    return Going(
        status,
        compare(oracle.result, read_result(run.folder)),
        left,
        run.log.read_text(errors="replace"),
    )


def damaged_row(bench: Bench) -> Row:
    """Damage every file of the newest checkpoint in every way: it is named and passed over, and nothing differs."""
    oracle = bench.oracle()
    base = stopped_run(oracle, bench.setting, "stopped", after=bench.job.steps - 2)
    files = sorted(path.name for path in published(base / "checkpoints")[-1].iterdir())
    cases = [(file, damage) for file in files for damage in DAMAGES]
    if bench.count < _FULL:
        cases = random.Random(f"damage/{bench.seed}").sample(
            cases, min(len(cases), bench.count)
        )
    outcomes = bench.all(
        lambda case: damage_checkpoint(oracle, bench.setting, base, *case), cases
    )
    return row_of(
        "damaged-checkpoint",
        "a file of the newest checkpoint damaged: named and passed over",
        outcomes,
    )


def damage_checkpoint(
    oracle: Oracle, setting: Setting, base: Path, file: str, damage: str
) -> Outcome:
    """Damage a copy of a stopped run once; a note where the run does not say what it passed over."""
    output = _copy(base, setting.place / f"{damage}-{file}")
    newest = published(output / "checkpoints")[-1]
    DAMAGES[damage](newest / file)
    going = go_on(oracle, setting, output)
    notes = (
        ()
        if f"{newest.name} is damaged" in going.said
        else (f"{newest.name} is not said to be damaged",)
    )
    difference = replace(going.difference, notes=(*going.difference.notes, *notes))
    return Outcome(
        output.name, (going.status,), difference, left=going.left, said=_last(going.said)
    )


def damaged_round_row(bench: Bench) -> Row:
    """Damage the newest committed round: it is refused and named; removed, it is made again."""
    oracle = bench.oracle()
    base = stopped_run(oracle, bench.setting, "stopped-with-rounds", after=bench.job.steps - 2)
    cases = [damage for damage in DAMAGES if damage != "deleted"]
    outcomes = bench.all(
        lambda damage: damage_round(oracle, bench.setting, base, damage), cases
    )
    return row_of(
        "damaged-round",
        "a committed round damaged: refused by name; without it, equal",
        outcomes,
    )


def damage_round(oracle: Oracle, setting: Setting, base: Path, damage: str) -> Outcome:
    output = _copy(base, setting.place / f"{damage}-round-of-{base.name}")
    newest = sorted((output / "journal").glob("round-*"))[-1]
    DAMAGES[damage](newest)
    refused = go_on(oracle, setting, output)
    if refused.status == 0:
        difference = replace(
            refused.difference, notes=(*refused.difference.notes, "a damaged round was taken")
        )
        return Outcome(output.name, (0,), difference, left=refused.left)
    notes = () if newest.name in refused.said else (f"{newest.name} is not named",)
    newest.unlink(missing_ok=True)
    going = go_on(oracle, setting, output)
    difference = replace(going.difference, notes=(*going.difference.notes, *notes))
    left = (*refused.left, *going.left)
    return Outcome(
        output.name,
        (refused.status, going.status),
        difference,
        left=left,
        said=_last(going.said),
    )


def resume_row(bench: Bench) -> Row:
    """Resume from every checkpoint of a whole run: with the journal, and with its later rounds made again."""
    kept = replace(bench.job, more=(*bench.job.more, "--save-total-limit", "100"))
    oracle = replace(bench.oracle(), job=kept)  # which changes nothing of the result
    whole, _ = whole_run(kept, bench.setting, name="whole-with-checkpoints")
    steps = [int(path.name.rpartition("-")[2]) for path in published(whole.checkpoints)]
    cases = [
        (step, replays) for step in steps if step < kept.steps for replays in (True, False)
    ]

    def run_case(case: tuple[int, bool]) -> Outcome:
        step, replays = case
        output = _copy(
            whole.root, bench.place / f"from-{step}-{'replayed' if replays else 'anew'}"
        )
        shutil.rmtree(output / "model")
        if not replays:
            for path in (output / "journal").glob("round-*"):
                if int(path.name.split("-")[1]) >= step:
                    path.unlink()
        going = go_on(oracle, bench.setting, output, "--resume-from", str(step))
        return Outcome(
            output.name,
            (going.status,),
            going.difference,
            left=going.left,
            said=_last(going.said),
        )

    return row_of(
        "resume-every",
        "resume from every checkpoint, rounds replayed and made anew",
        bench.all(run_case, cases),
    )


def flush_row(bench: Bench) -> Row:
    """Count the rounds and checkpoints of all runs so far that were flushed before they got their name."""
    log = Path(bench.setting.environment[FLUSHES_VARIABLE])
    bench.oracle()
    num_flushed, unflushed = read_flushes(log)
    return Row(
        "flushes",
        "rounds and checkpoints flushed before their rename",
        num_flushed,
        num_flushed + len(unflushed),
        failures=tuple(unflushed),
    )


def _copy(base: Path, place: Path) -> Path:
    shutil.copytree(base, place, ignore=shutil.ignore_patterns("sockets", "weights"))
    return place


def _last(said: str) -> str:
    return said.strip().rpartition("\n")[2]


_KILLS_A_RUN = 10
_LATER = 3  # the save in which a run that is not resumed is killed: it has checkpoints already
_LONGEST_SAVE_S = 0.25  # of the tiny model
_SPARE_SAVES = 5  # that were over before the kill
_STOPS_WITHIN_S = 0.005


@dataclass(slots=True)
class _Aim:
    """How long after a save's beginning a kill comes at most; shorter after each that came too late."""

    longest_s: float = _LONGEST_SAVE_S


@dataclass(frozen=True, slots=True)
class _Chain:
    """One run that is killed `kills` times, each time in a later save while there are any."""

    oracle: Oracle
    setting: Setting
    name: str
    kills: int
    seed: str
    first_save: int = 1
    is_resumed: bool = True


def save_row(bench: Bench) -> Row:
    """After every kill the newest checkpoint must verify; at the end of each run, nothing may differ."""
    total = num_kills(bench.count)
    lengths = [min(_KILLS_A_RUN, total - start) for start in range(0, total, _KILLS_A_RUN)]
    oracle, name = _oracle(bench), "kill-in-save"
    chains = [
        _Chain(
            oracle,
            bench.setting,
            f"{name}-{number}",
            kills,
            f"saves/{bench.seed}/{name}/{number}",
        )
        for number, kills in enumerate(lengths)
    ]
    return _row(bench, chains, name, "kill -9 in a save: the newest checkpoint verifies")


def in_place_row(bench: Bench) -> Row:
    """Run the control: of an in-place writer, some must be broken."""
    package = copy_package(bench.place / "in-place-package", (IN_PLACE,))
    oracle, setting, name = _oracle(bench), replace(bench.setting, package=package), "in-place"
    chains = [
        _Chain(
            oracle,
            setting,
            f"{name}-{number}",
            1,
            f"saves/{bench.seed}/{name}/{number}",
            _LATER,
            is_resumed=False,
        )
        for number in range(max(2, num_kills(bench.count) // 5))
    ]
    row = _row(bench, chains, name, "the same, of a writer that saves in place")
    broken = row.total - row.passed
    return replace(
        row,
        description=f"{row.description}: must be found broken",
        passed=broken,
        wants_all=False,
        failures=() if broken else ("not one checkpoint was broken: the kills miss the saves",),
        total=row.total if broken else 0,
        wrong=0,
        left=0,
    )


def killed_in_save(
    oracle: Oracle, setting: Setting, name: str, *, step: int, share: float
) -> Outcome:
    """Kill one run in the save of this step, and do not resume it: its newest checkpoint must verify."""
    chain = _Chain(oracle, setting, name, 1, "", step, is_resumed=False)
    return _kill_in_save(chain, setting.place / name, step=step, share=share, aim=_Aim())


def num_kills(moments: int) -> int:
    """Return a hundred at full size, which is thirty moments."""
    return max(2, moments * 10 // 3)


def _oracle(bench: Bench) -> Oracle:
    return bench.oracle(
        replace(bench.job, steps=_KILLS_A_RUN + 2 + _SPARE_SAVES, checkpoint_every=1)
    )


def _row(bench: Bench, chains: Sequence[_Chain], name: str, description: str) -> Row:
    chained = list(bench.pool.map(lambda chain: _follow(chain, bench), chains))
    outcomes = [outcome for outcomes in chained for outcome in outcomes]
    wants_landing = any(chain.is_resumed for chain in chains)

    def is_good(outcome: Outcome) -> bool:
        return (
            outcome.difference.is_none
            and outcome.is_clean
            and (outcome.landed or not wants_landing)
        )

    return row_of(name, description, outcomes, good=is_good)


def _follow(chain: _Chain, bench: Bench) -> list[Outcome]:
    """Return the outcome of every kill; the last one's is also that of the whole run."""
    output, source = chain.setting.place / chain.name, random.Random(chain.seed)
    outcomes, aim = [], _Aim()
    for number in range(chain.kills):
        outcome = _kill_in_save(
            chain, output, step=chain.first_save + number, share=source.random(), aim=aim
        )
        bench.say(f"  {'ok  ' if outcome.difference.is_none else 'FAIL'} {outcome}")
        outcomes.append(outcome)
        if outcome.exits[-1] not in (1, -signal.SIGKILL):
            break
    if not chain.is_resumed:
        return outcomes
    run = Run(chain.setting, resume_words(chain.oracle.job, output), output)
    try:
        status = run.wait(timeout_s=chain.oracle.limit_s)
        left = leftovers(run)
    finally:
        run.end()
    last, result = outcomes[-1], read_result(run.folder)
    seen = (
        compare(chain.oracle.result, result)
        if chain.oracle.repeats
        else compare_steps(result, result)
    )
    difference = Difference(seen.largest, (*last.difference.notes, *seen.notes))
    said = "" if status == 0 else run.tail(1)
    outcomes[-1] = replace(
        last, exits=(*last.exits, status), difference=difference, left=tuple(left), said=said
    )
    return outcomes


def _kill_in_save(
    chain: _Chain, output: Path, *, step: int, share: float, aim: _Aim
) -> Outcome:
    """Start or go on, and kill the trainer while it saves this step or, if that was too late, one after it."""
    name, limit_s = f"{chain.name}-save-{step}", chain.oracle.limit_s
    saved_steps = [
        int(path.name.rpartition("-")[2]) for path in published(output / "checkpoints")
    ]
    step = min(max(step, max(saved_steps, default=0) + 1), chain.oracle.job.steps)
    run = Run(chain.setting, resume_words(chain.oracle.job, output), output)
    try:
        run.wait_for(
            lambda: run.num_steps() >= step - 1 and bool(run.role("trainer")), timeout_s=limit_s
        )
        trainers = run.role("trainer")
        landed = bool(trainers) and _kill_while_saving(
            chain, run, trainers[0], step=step, share=share, aim=aim
        )
        status = run.wait(timeout_s=limit_s)
        left = leftovers(run)
    finally:
        run.end()
    problem = newest_problem(run.folder.checkpoints)
    return Outcome(
        name,
        (status,),
        difference=Difference(notes=() if problem is None else (problem,)),
        phase="save" if landed else None,
        left=tuple(left),
        landed=landed,
    )


def _kill_while_saving(
    chain: _Chain, run: Run, trainer: psutil.Process, *, step: int, share: float, aim: _Aim
) -> bool:
    """Whether the kill landed in a save: the trainer is stopped, looked at, and killed only where it was saving.

    A writer that saves in place is killed once, wherever it is by then.
    """
    for number in range(step, chain.oracle.job.steps + 1):
        begins = partial(_has_begun, run.folder.checkpoints, number)
        if (
            not run.wait_for(begins, timeout_s=chain.oracle.limit_s)
            or run.exit_code is not None
        ):
            return False
        time.sleep(share * aim.longest_s)
        try:
            trainer.suspend()
            time.sleep(_STOPS_WITHIN_S)
            in_save = any(
                entry.startswith(".saving-") for entry in os.listdir(run.folder.checkpoints)
            )
            if in_save or not chain.is_resumed:
                trainer.kill()
                return in_save
            trainer.resume()
        except psutil.Error:  # it has ended
            return False
        aim.longest_s /= 2
    return False


def _has_begun(checkpoints: Path, step: int) -> bool:
    """Whether anything of that checkpoint is there, under whichever name."""
    try:
        return any(name.endswith(f"checkpoint-{step}") for name in os.listdir(checkpoints))
    except FileNotFoundError:
        return False
