"""The curriculum: prompts are drawn by how likely a group of theirs can teach, which the run learns from their groups.

DAPO (arXiv 2503.14476, section 3.2) writes a group first and then finds out that it cannot teach. Here such a prompt
comes up less often afterwards. Every rank has the same memory, so a position gives the same prompt whoever draws it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from ycore.config.schema import RunConfig
from ycore.errors import DataError
from ycore.scoring.group_rewards import TOLERANCE
from ycore.types import JsonObject, Prompt, Record, number_from

_MEMORY = 0.5  # weight that a group keeps when the prompt's next one comes
_PRIOR = 0.1  # groups that the first guess of a prompt counts for

GroupLearned = tuple[int, float, float]
"""The prompt's row, `chance_of` its group, and the group's mean reward."""


def chance_of(totals_G: Sequence[float]) -> float:
    """The probability that another group of these rewards has two that differ, between 0 and 1.

    Each completion is drawn from those of the group, with replacement: 1 - sum over the different rewards v of
    (n_v / G)^G. With k of G right it is 1 - (k/G)^G - (1 - k/G)^G.
    """
    size = len(totals_G)
    counts = Counter(round(total / TOLERANCE) for total in totals_G)
    return 1 - sum((count / size) ** size for count in counts.values()) if size > 1 else 0.0


@dataclass(slots=True)
class _Seen:
    taught: float = 0.0
    groups: float = 0.0
    solved: int = 0  # of its last groups, those in a row that were solved


@dataclass(kw_only=True)
class Curriculum:
    """Which positions of the run's order are drawn: `takes`. `learn` it from the groups of all ranks.

    Args:
        seed: the run's.
        guesses: the chance of each row before its first group; None is 1 for all.
        drop_after: a prompt is drawn no more once so many of its groups in a row were solved; 0 never drops one.
        drop_at: a group is solved whose mean reward is this share of the highest mean of any group of the run; with 1
            also all its completions must have it.
        least: of its positions, those at which a prompt is drawn that never taught: the policy may have learned since.
    """

    seed: int
    guesses: Sequence[float] | None = None
    drop_after: int = 3
    drop_at: float = 1.0
    least: float = 0.1

    def __post_init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._best = float("-inf")

    @classmethod
    def of(cls, config: RunConfig, prompts: Sequence[Prompt]) -> Self | None:
        """Build a run's curriculum; None where it has none."""
        settings = config.sampling
        if not settings.curriculum:
            return None
        guesses = None
        if isinstance(settings.curriculum, str):
            guesses = guesses_from(prompts, settings.curriculum, config.group_size)
        return cls(
            seed=config.seed,
            guesses=guesses,
            drop_after=settings.drop_after,
            drop_at=settings.drop_at,
            least=settings.least,
        )

    def takes(self, position: int, row: int) -> bool:
        """Whether this row is drawn at this position; the same on every rank, and again after a resume."""
        return number_from(f"curriculum/{self.seed}/{position}") / 2**63 < self.weight(row)

    def weight(self, row: int) -> float:
        """The share of its positions at which this row is drawn."""
        seen = self._seen.get(row, _Seen())
        if 0 < self.drop_after <= seen.solved:
            return 0.0
        guess = 1.0 if self.guesses is None else self.guesses[row]
        return max(self.least, (seen.taught + _PRIOR * guess) / (seen.groups + _PRIOR))

    def learn(self, groups: Iterable[GroupLearned]) -> None:
        """Learn from the groups that the ranks wrote in a round, in an order that all ranks share."""
        learned = list(groups)
        self._best = max([self._best, *(reward for _, _, reward in learned)])
        for row, chance, reward in learned:
            seen = self._seen.setdefault(row, _Seen())
            seen.taught = seen.taught * _MEMORY + chance
            seen.groups = seen.groups * _MEMORY + 1
            solved = reward > self._best * (self.drop_at if self._best > 0 else 1) - TOLERANCE
            seen.solved = seen.solved + 1 if solved and (chance == 0 or self.drop_at < 1) else 0

    @property
    def num_dropped(self) -> int:
        return sum(0 < self.drop_after <= seen.solved for seen in self._seen.values())

    def state_dict(self) -> JsonObject:
        rows = [
            [row, seen.taught, seen.groups, seen.solved] for row, seen in self._seen.items()
        ]
        return {"rows": rows, "best": self._best if rows else None}

    def load_state_dict(self, state: Record) -> None:
        self._seen = {row: _Seen(*seen) for row, *seen in state["rows"]}
        self._best = float("-inf") if state["best"] is None else state["best"]


def guesses_from(prompts: Sequence[Prompt], column: str, group_size: int) -> list[float]:
    """The chance of every row, from a column with the share of its completions that are expected to be right."""
    rates = [_rate(prompt, column) for prompt in prompts]
    return [1 - rate**group_size - (1 - rate) ** group_size for rate in rates]


def _rate(prompt: Prompt, column: str) -> float:
    value = prompt.columns.get(column)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise DataError(
            f"row {prompt.row}: --curriculum {column} takes the share of right completions from that column, a number "
            f"from 0 to 1; it is {value!r}; correct it, or take --curriculum on, which needs no column"
        )
    return float(value)


def stats_of(totals_G: Sequence[float | None]) -> tuple[float, float] | None:
    """A group's chance and mean reward, from its completions' rewards; None where fewer than two have one."""
    known = [total for total in totals_G if total is not None]
    return (chance_of(known), sum(known) / len(known)) if len(known) > 1 else None
