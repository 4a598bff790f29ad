"""Rows: kills inside a save, over and over in the same run; and the same of a writer that saves in place.

The harness is only as good as its aim. So an in-place writer, a patched copy of the package that gives a checkpoint its
name before it is written, is killed by the same hand, and must be caught with broken checkpoints often.

Not here: checkpoints that are damaged afterwards (`rows_files`).
"""

import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ycore.selftest.bench import Bench, Row, row_of
from ycore.selftest.comparison import Difference, compare, compare_steps, read_result
from ycore.selftest.copies import copy_package
from ycore.selftest.manifests import newest_problem
from ycore.selftest.mutations import IN_PLACE
from ycore.selftest.oracle import Oracle
from ycore.selftest.runs import Run, Setting, leftovers
from ycore.selftest.trial import Outcome, resume_words

_KILLS_A_RUN = 10
_LATER = 3  # the save in which a run that is not resumed is killed: it has checkpoints already
_LONGEST_SAVE_S = 0.25  # of the tiny model; a kill after the save's end lands in the next step, and is counted there


@dataclass(frozen=True, slots=True)
class _Chain:
    """One run that is killed `kills` times, each time in a later save."""

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
        _Chain(oracle, bench.setting, f"{name}-{number}", kills, f"saves/{bench.seed}/{name}/{number}")
        for number, kills in enumerate(lengths)
    ]
    return _row(bench, chains, name, "kill -9 in a save: the newest checkpoint verifies")


def in_place_row(bench: Bench) -> Row:
    """The control: of an in-place writer, some must be broken."""
    package = copy_package(bench.place / "in-place-package", (IN_PLACE,))
    oracle, setting, name = _oracle(bench), replace(bench.setting, package=package), "in-place"
    chains = [
        _Chain(oracle, setting, f"{name}-{number}", 1, f"saves/{bench.seed}/{name}/{number}", _LATER, is_resumed=False)
        for number in range(max(2, num_kills(bench.count) // 5))
    ]
    row = _row(bench, chains, name, "the same, of a writer that saves in place")
    broken = row.total - row.passed
    return replace(
        row,
        what=f"{row.what}: must be found broken",
        passed=broken,
        wants_all=False,
        failures=() if broken else ("not one checkpoint was broken: the kills miss the saves",),
        total=row.total if broken else 0,
        wrong=0,
        left=0,
    )


def killed_in_save(oracle: Oracle, setting: Setting, name: str, *, step: int, share: float) -> Outcome:
    """One run killed in the save of this step, and not resumed: whether its newest checkpoint verifies."""
    chain = _Chain(oracle, setting, name, 1, "", step, is_resumed=False)
    return _kill_in_save(chain, setting.place / name, step=step, share=share)


def num_kills(moments: int) -> int:
    """A hundred at full size, which is thirty moments."""
    return max(2, moments * 10 // 3)


def _oracle(bench: Bench) -> Oracle:
    return bench.oracle(replace(bench.job, steps=_KILLS_A_RUN + 2, checkpoint_every=1))


def _row(bench: Bench, chains: Sequence[_Chain], name: str, what: str) -> Row:
    told = list(bench.pool.map(lambda chain: _follow(chain, bench), chains))
    outcomes = [outcome for outcomes in told for outcome in outcomes]
    return row_of(name, what, outcomes, good=lambda outcome: outcome.difference.is_none and outcome.is_clean)


def _follow(chain: _Chain, bench: Bench) -> list[Outcome]:
    """The outcome of every kill; the last one's is also that of the whole run."""
    output, source = chain.setting.place / chain.name, random.Random(chain.seed)
    outcomes = []
    for number in range(chain.kills):
        outcome = _kill_in_save(chain, output, step=chain.first_save + number, share=source.random())
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
    seen = compare(chain.oracle.result, result) if chain.oracle.repeats else compare_steps(result, result)
    difference = Difference(seen.largest, (*last.difference.notes, *seen.notes))
    said = "" if status == 0 else run.tail(1)
    outcomes[-1] = replace(last, exits=(*last.exits, status), difference=difference, left=tuple(left), said=said)
    return outcomes


def _kill_in_save(chain: _Chain, output: Path, *, step: int, share: float) -> Outcome:
    """Start or go on, wait for the save of this step to begin, and kill the trainer a moment later."""
    name = f"{chain.name}-save-{step}"
    run = Run(chain.setting, resume_words(chain.oracle.job, output), output)
    try:
        run.wait_for(lambda: run.num_steps() >= step - 1 and bool(run.role("trainer")), timeout_s=chain.oracle.limit_s)
        trainers = run.role("trainer")
        began = run.wait_for(lambda: _has_begun(run.folder.checkpoints, step), timeout_s=chain.oracle.limit_s)
        time.sleep(share * _LONGEST_SAVE_S)
        landed = began and bool(trainers) and run.exit_code is None
        if landed:
            trainers[0].send_signal(signal.SIGKILL)
        in_save = any(entry.startswith(".saving-") for entry in os.listdir(run.folder.checkpoints))
        status = run.wait(timeout_s=chain.oracle.limit_s)
        left = leftovers(run)
    finally:
        run.end()
    problem = newest_problem(run.folder.checkpoints)
    return Outcome(
        name,
        (status,),
        difference=Difference(notes=() if problem is None else (problem,)),
        phase="save" if in_save else "train",
        left=tuple(left),
        landed=landed,
    )


def _has_begun(checkpoints: Path, step: int) -> bool:
    """Whether anything of that checkpoint is there, under whichever name."""
    try:
        return any(name.endswith(f"checkpoint-{step}") for name in os.listdir(checkpoints))
    except FileNotFoundError:
        return False
