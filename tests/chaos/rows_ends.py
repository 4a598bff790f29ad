"""The row `ends`: a run ends in one of many ways, at a moment drawn from the seed, with foreign things beside it.

The reward starts daemons that hide in every way: a session of their own, an empty environment, a double fork whose
parent ends at once. Nothing of the run may be left, and nothing foreign may be touched. The run is short where it is to
end well, and far too long where it is to be ended, so that every deed lands. In nine of ten trials a trainer that
learns nothing stands in for the real one; launcher, guardian and reward workers are always real.
"""

import hashlib
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from tests.chaos import light_trainer
from tests.chaos.bench import Bench, Row, row_of
from tests.chaos.foreign import Foreign, Twin, Witness, can_make_twins
from tests.chaos.job import DAEMON
from tests.chaos.results import Difference
from tests.chaos.runs import Run, Setting
from tests.chaos.trial import INTERRUPTED, Outcome
from ycore.errors import RunError
from ycore.run.files import RunFolder

_COMES_WITHIN_S = 600.0
_GONE_WITHIN_S = 12.0
_LATEST_S = 1.5
_BETWEEN_S = 0.4
_LONG = 5000
"""Steps of a run that is to be ended."""

STAGES: Mapping[str, Callable[[RunFolder], bool]] = {
    "start": lambda folder: _begun(folder).exists(),
    "claimed": lambda folder: folder.config.exists(),
    "guarded": lambda folder: folder.sockets.exists(),
    "engines": lambda folder: folder.engines.exists(),
    "trainer": lambda folder: folder.log("trainer").exists(),
    "rewards": lambda folder: folder.log("rewards").exists(),
    "steps": lambda folder: folder.metrics.exists(),
}
"""How far a run is; a deed is done a moment after that is reached."""


def _begun(folder: RunFolder) -> Path:
    """Return the file made by the command's first instruction: before it a signal ends Python as any program."""
    return folder.root.with_name(f"{folder.root.name}.begun")


Deed = Callable[[Run, Witness], bool]


def signalled(*numbers: signal.Signals) -> Deed:
    """Send the launcher these signals, one after the other."""

    def deed(run: Run, witness: Witness) -> bool:
        landed = run.exit_code is None
        for number in numbers:
            run.process.send_signal(number)
            time.sleep(_BETWEEN_S if len(numbers) > 1 else 0.0)
        return landed

    return deed


def killed(*roles: str, then: Deed | None = None) -> Deed:
    """Kill a process of each role with SIGKILL, as soon as all are there, and then do something else."""

    def deed(run: Run, witness: Witness) -> bool:
        processes: list[psutil.Process] = []

        def are_there() -> bool:
            processes[:] = [
                process for role in roles for process in _of(run, witness, role)[:1]
            ]
            return len(processes) == len(roles)

        if not run.wait_for(are_there, timeout_s=_COMES_WITHIN_S, every_s=0.05):
            return False
        for process in processes:
            process.kill()
        if then is None:
            return True
        time.sleep(_BETWEEN_S)
        return then(run, witness)

    return deed


def _of(run: Run, witness: Witness, role: str) -> list[psutil.Process]:
    return [psutil.Process(run.process.pid)] if role == "launcher" else witness.role(role)


def _close_terminal(run: Run, witness: Witness) -> bool:
    landed = run.exit_code is None
    run.close_terminal()
    return landed


def _nothing(run: Run, witness: Witness) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class End:
    """`exits`: what the shell may see."""

    deed: Deed
    exits: tuple[int, ...]
    stages: tuple[str, ...] = tuple(STAGES)
    steps: int = _LONG
    early: tuple[int, ...] = ()
    """Other exits, up to the stage `claimed`: only SIGINT is handled from the first instruction on."""

    is_cleared_by_the_next: bool = False
    """Whether only the folder's next run clears up, because launcher and guardian are both gone."""


_ctrl_c = signalled(signal.SIGINT)
_WITH_GUARDIAN = ("guarded", "engines", "trainer", "rewards", "steps")
ENDS: Mapping[str, End] = {
    "success": End(_nothing, (0,), ("start",), steps=1),
    "error": End(_nothing, (1,), ("start",), steps=2),
    "ctrl-c": End(_ctrl_c, (INTERRUPTED,)),
    "ctrl-c-twice": End(signalled(signal.SIGINT, signal.SIGINT), (INTERRUPTED,)),
    "sigterm": End(signalled(signal.SIGTERM), (INTERRUPTED,), early=(-signal.SIGTERM,)),
    "sighup": End(signalled(signal.SIGHUP), (INTERRUPTED,), early=(-signal.SIGHUP,)),
    "terminal-closed": End(_close_terminal, (INTERRUPTED,), early=(-signal.SIGHUP,)),
    "kill-launcher": End(signalled(signal.SIGKILL), (-signal.SIGKILL,)),
    "kill-trainer": End(killed("trainer"), (1,), ("trainer", "rewards", "steps")),
    "kill-engine": End(
        killed("rollout", then=_ctrl_c),
        (INTERRUPTED, 1),
        ("engines", "trainer", "rewards", "steps"),
    ),
    "kill-guardian": End(killed("guardian", then=_ctrl_c), (INTERRUPTED,), _WITH_GUARDIAN),
    "kill-both": End(
        killed("launcher", "guardian"),
        (-signal.SIGKILL,),
        _WITH_GUARDIAN,
        is_cleared_by_the_next=True,
    ),
    "kill-reward": End(killed("reward", then=_ctrl_c), (INTERRUPTED,), ("rewards", "steps")),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One end: which, how far the run is by then, how long after that, and how the reward's daemon hides."""

    number: int
    kind: str
    stage: str
    delay_s: float
    reward: str

    @property
    def name(self) -> str:
        hides = self.reward.replace("_", "-")
        return f"end-{self.number}-{self.kind}-{self.stage}-{hides}" + (
            "" if self.is_light else "-real"
        )

    @property
    def is_light(self) -> bool:
        """Whether the trainer is the light one. Every tenth is real; with 13 kinds, each kind gets its share."""
        return self.number % 10 > 0


REWARDS = ("with_daemon", "with_orphan", "ending_after_orphan")


def draw_cases(count: int, *, seed: int) -> list[Case]:
    """Deal kinds evenly, and draw everything else. Pure."""
    source, kinds = random.Random(f"ends/{seed}"), list(ENDS)
    cases = []
    for number in range(count):
        if number % len(kinds) == 0:
            source.shuffle(kinds)
        kind = kinds[number % len(kinds)]
        reward = source.choice(REWARDS if kind != "success" else REWARDS[:2])
        stage, delay_s = source.choice(ENDS[kind].stages), source.uniform(0.0, _LATEST_S)
        cases.append(Case(number, kind, stage, delay_s, reward))
    return cases


def ends_row(bench: Bench) -> Row:
    """Make `count` ends; nothing is left of any, nothing foreign touched by any."""
    place = bench.place / "ends"
    place.mkdir()
    cases = draw_cases(bench.count, seed=bench.seed)
    outcomes = bench.all(lambda case: end_one(bench, place, case), cases, good=_is_good)
    kinds = Counter(
        case.kind for case, outcome in zip(cases, outcomes, strict=True) if _is_good(outcome)
    )
    row = row_of(
        "ends",
        "ended in any way at any moment: 0 left, 0 foreign touched",
        outcomes,
        good=_is_good,
    )
    touched = sum(
        "foreign" in note or "same path" in note
        for outcome in outcomes
        for note in outcome.difference.notes
    )
    return replace(
        row,
        more={
            **row.more,
            "foreign_touched": touched,
            "twins": can_make_twins(),
            "real_trainers": sum(not case.is_light for case in cases),
            "passed": dict(kinds),
        },
    )


def _is_good(outcome: Outcome) -> bool:
    return outcome.landed and outcome.is_clean and outcome.difference.is_none


def end_one(bench: Bench, place: Path, case: Case) -> Outcome:
    """End one run with foreign things beside it."""
    began, end, output = time.monotonic(), ENDS[case.kind], place / case.name
    daemon = DAEMON + hashlib.sha256(os.fsencode(output)).hexdigest()[:12]
    job = replace(bench.job, steps=end.steps, checkpoint_every=_LONG, reward=case.reward)
    scripted = dict(bench.setting.scripted or {})
    scripted["begun"] = str(_begun(RunFolder(output)))
    scripted |= {"trainer": light_trainer.MODULE} if case.is_light else {}
    setting = Setting(place.parent, scripted, bench.setting.package, stop=bench.setting.stop)
    with Foreign(output, job.inputs / "train.jsonl", Path(tempfile.gettempdir())) as foreign:
        words = [
            *job.words(output),
            "--dataset",
            str(foreign.dataset),
            "--set",
            f"rewards.0.args.name={daemon}",
        ]
        words += ["--learning-rate", "1e38"] if case.kind == "error" else []
        twin = Twin(output, setting.full_environment()) if can_make_twins() else None
        witness = _witness(case, daemon)
        run = Run(setting, words, output, in_terminal=case.kind == "terminal-closed")
        witness.add(run.process.pid)
        try:
            landed = _do(run, witness, case, foreign)
            status = run.wait(timeout_s=_COMES_WITHIN_S)
            notes = (
                _run_next(setting, words, output, witness) if end.is_cleared_by_the_next else []
            )
            left = _left(run, witness)
            notes += [*foreign.touched(), *(twin.touched() if twin is not None else [])]
        finally:
            if twin is not None:
                twin.close()
            run.end()
            witness.close()
    right = (*end.exits, *(end.early if case.stage in ("start", "claimed") else ()))
    notes += (
        [] if status in right else [f"exit status {status}, not {' or '.join(map(str, right))}"]
    )
    seconds = time.monotonic() - began
    difference = Difference(notes=tuple(notes))
    return Outcome(
        case.name,
        (status,),
        difference,
        left=tuple(left),
        said=run.tail(1),
        seconds=seconds,
        landed=landed,
    )


def _witness(case: Case, daemon: str) -> Witness:
    try:
        return Witness(f"ycore-chaos-{daemon.removeprefix(DAEMON)}")
    except ValueError as problem:
        raise RunError(f"{case.name}: {problem}") from None


def _do(run: Run, witness: Witness, case: Case, foreign: Foreign) -> bool:
    """Wait for the moment, and do the deed; say whether that was before the run had ended."""
    if case.kind in ("success", "error"):
        return True
    if not run.wait_for(
        lambda: STAGES[case.stage](run.folder), timeout_s=_COMES_WITHIN_S, every_s=0.01
    ):
        return False
    time.sleep(case.delay_s)
    foreign.make_more()
    return run.exit_code is None and ENDS[case.kind].deed(run, witness)


def _run_next(setting: Setting, words: list[str], output: Path, witness: Witness) -> list[str]:
    """Start the folder's next run in the same witness's group, end it once it is guarded, and say what went wrong."""
    next_words = [*words, "--resume"] if (output / "run.json").is_file() else words
    run = Run(setting, next_words, output)
    witness.add(run.process.pid)
    try:
        run.wait_for(
            lambda: bool(witness.role("guardian")), timeout_s=_COMES_WITHIN_S, every_s=0.05
        )
        time.sleep(_BETWEEN_S)
        run.process.send_signal(signal.SIGINT)
        status = run.wait(timeout_s=_COMES_WITHIN_S)
    finally:
        run.end()
    return [] if status == INTERRUPTED else [f"the next run ended with {status}"]


def _left(run: Run, witness: Witness) -> list[str]:
    """Name the processes and the run's folders that are still there after a while."""
    folder, deadline = run.folder, time.monotonic() + _GONE_WITHIN_S
    paths = [folder.sockets, folder.shared_memory, folder.temporary]
    while True:
        left = []
        for process in witness.processes():
            with suppress(psutil.Error):  # ended meanwhile
                left.append(f"process {process.pid} {process.name()}")
        left += [str(path) for path in dict.fromkeys(paths) if path.exists()]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)
