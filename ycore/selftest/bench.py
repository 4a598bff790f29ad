"""What every row of the scorecard works with, and what it says in the end.

Not here: the rows (`rows_*`), and their order (`scorecard`).
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ycore.selftest.comparison import worst
from ycore.selftest.job import Job, Tier
from ycore.selftest.oracle import Oracle, make_oracle
from ycore.selftest.phases import PHASES
from ycore.selftest.runs import Setting
from ycore.selftest.trial import Outcome

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the scorecard: `passed` of `total`, and everything that failed, in words."""

    name: str
    what: str
    passed: int
    total: int
    failures: tuple[str, ...] = ()
    phases: Mapping[str, int] = field(default_factory=dict)
    worst: Mapping[str, float] = field(default_factory=dict)
    wrong: int = 0
    """Ends with exit status 0 and another result."""

    left: int = 0
    """Runs of which something was left behind."""

    more: Mapping[str, Any] = field(default_factory=dict)
    wants_all: bool = True
    """False where the row counts rather than judges, as a control does."""

    @property
    def passes(self) -> bool:
        return self.total > 0 and self.wrong == 0 and (self.passed == self.total or not self.wants_all)


def is_good(outcome: Outcome) -> bool:
    """Equal, and nothing left: what most rows want."""
    return outcome.passes


@dataclass(slots=True)
class Bench:
    """`count` is how many trials a row takes; `pool` has as many threads as runs may go on at a time."""

    job: Job
    setting: Setting
    pool: Executor
    seed: int
    count: int
    say: Callable[[str], None]
    oracle_runs: int = 2
    """How often a whole run is taken; from the second on, it must repeat the first."""

    began: float = field(default_factory=time.monotonic)
    _oracles: dict[Job, Oracle] = field(default_factory=dict)

    @property
    def tier(self) -> Tier:
        return self.job.tier

    @property
    def place(self) -> Path:
        return self.setting.place

    def oracle(self, job: Job | None = None) -> Oracle:
        """The whole run of a job, made once."""
        job = job or self.job
        if job not in self._oracles:
            self._oracles[job] = make_oracle(
                job, self.setting, self.pool, name=f"whole-{len(self._oracles)}", times=self.oracle_runs
            )
        return self._oracles[job]

    def all(
        self, work: Callable[[T], Outcome], over: Iterable[T], *, good: Callable[[Outcome], bool] = is_good
    ) -> list[Outcome]:
        """The outcomes in order, as many at a time as the pool has threads; each is told as it comes."""

        def told(item: T) -> Outcome:
            outcome = work(item)
            self.say(f"  {'ok  ' if good(outcome) else 'FAIL'} {outcome} ({outcome.seconds:.0f} s)")
            return outcome

        return list(self.pool.map(told, over))


def row_of(name: str, what: str, outcomes: Sequence[Outcome], *, good: Callable[[Outcome], bool] = is_good) -> Row:
    """A row from its trials; `good` says which pass."""
    failed = [outcome for outcome in outcomes if not good(outcome)]
    landed = Counter(outcome.phase for outcome in outcomes if outcome.landed and outcome.phase)
    return Row(
        name=name,
        what=what,
        passed=len(outcomes) - len(failed),
        total=len(outcomes),
        failures=tuple(map(str, failed)),
        phases={phase: landed[phase] for phase in PHASES} if landed else {},
        worst=worst(outcome.difference for outcome in outcomes if outcome.exits[-1] == 0),
        wrong=sum(outcome.is_wrong for outcome in outcomes),
        left=sum(not outcome.is_clean for outcome in outcomes),
        more={
            "landed": sum(outcome.landed for outcome in outcomes),
            "resumed": sum(len(outcome.exits) > 1 for outcome in outcomes),
            "differ_from_whole_run": sum(outcome.differs_from_whole for outcome in outcomes),
        },
    )
