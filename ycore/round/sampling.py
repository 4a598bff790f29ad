"""Which prompt comes next, which groups can teach, and how many to write: the decisions of dynamic sampling.

DAPO (arXiv 2503.14476, section 3.2) writes a group first and then finds out that it cannot teach. With a curriculum such
a prompt comes up less often afterwards: the run learns from its groups how likely a group of a prompt can teach. Every
rank has the same memory, so a position gives the same prompt whoever draws it.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, astuple, dataclass, field, replace
from statistics import fmean, pstdev
from typing import Any, NamedTuple, Self

from ycore.advantages import TOLERANCE
from ycore.config.schema import RunConfig, SamplingSettings
from ycore.data.prompts import row_at
from ycore.errors import DataError, ModelError
from ycore.models.model_facts import facts_of
from ycore.round.peers import Counts, Peers
from ycore.scoring.group_rewards import (
    Constraints,
    can_teach,
    compared_rewards,
    without_none,
)
from ycore.types import (
    Draw,
    Finished,
    Group,
    JsonObject,
    Prompt,
    Record,
    from_json,
    number_from,
    to_json,
)

_MEMORY = 0.5  # weight that a group keeps when the prompt's next one comes
_PRIOR = 0.1  # groups that the first guess of a prompt counts for


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
        settings: `drop_after`: a prompt is drawn no more once so many of its groups in a row were solved; 0 never drops
            one. `drop_at`: a group is solved whose mean reward is this share of the highest mean of any group of the
            run; with 1 also all its completions must have it. `least`: of its positions, those at which a prompt is
            drawn that never taught: the policy may have learned since.
        guesses: the chance of each row before its first group; None is 1 for all.
    """

    seed: int
    settings: SamplingSettings = field(default_factory=SamplingSettings)
    guesses: Sequence[float] | None = None

    def __post_init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._best = float("-inf")

    @classmethod
    def of(cls, config: RunConfig, prompts: Sequence[Prompt]) -> Self | None:
        """Build a run's curriculum; None where it has none. An evaluation asks every prompt."""
        settings = config.sampling
        if not settings.curriculum or config.algorithm == "eval":
            return None
        guesses = None
        if isinstance(settings.curriculum, str):
            guesses = guesses_from(prompts, settings.curriculum, config.group_size)
        return cls(seed=config.seed, settings=settings, guesses=guesses)

    def takes(self, position: int, row: int) -> bool:
        """Whether this row is drawn at this position; the same on every rank, and again after a resume."""
        return number_from(f"curriculum/{self.seed}/{position}") / 2**63 < self.weight(row)

    def weight(self, row: int) -> float:
        """The share of its positions at which this row is drawn."""
        seen = self._seen.get(row, _Seen())
        if 0 < self.settings.drop_after <= seen.solved:
            return 0.0
        guess = 1.0 if self.guesses is None else self.guesses[row]
        return max(self.settings.least, (seen.taught + _PRIOR * guess) / (seen.groups + _PRIOR))

    def learn(self, groups: Iterable[tuple[int, float, float]]) -> None:
        """Learn from the groups that the ranks wrote in a round, in an order that all ranks share.

        Args:
            groups: the prompt's row, `chance_of` its group, and the group's mean reward.
        """
        learned = list(groups)
        self._best = max([self._best, *(reward for _, _, reward in learned)])
        for row, chance, reward in learned:
            seen = self._seen.setdefault(row, _Seen())
            seen.taught = seen.taught * _MEMORY + chance
            seen.groups = seen.groups * _MEMORY + 1
            solved = (
                reward
                > self._best * (self.settings.drop_at if self._best > 0 else 1) - TOLERANCE
            )
            seen.solved = (
                seen.solved + 1 if solved and (chance == 0 or self.settings.drop_at < 1) else 0
            )

    @property
    def num_dropped(self) -> int:
        return sum(0 < self.settings.drop_after <= seen.solved for seen in self._seen.values())

    def state_dict(self) -> JsonObject:
        rows = [[row, *astuple(seen)] for row, seen in self._seen.items()]
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


def stats_of(
    totals_G: Sequence[float | None],
    rewards_G: Sequence[float | None] | None = None,
    *,
    teaches: bool,
) -> tuple[float, float] | None:
    """A group's chance, from its completions' rewards, and their mean; None where fewer than two have one.

    Args:
        rewards_G: The rewards of which the mean is taken, where it is not `totals_G`.
        teaches: The group teaches; its chance is 1 where that is by more than totals that differ (turns, each reward
            alone, a greedy baseline).
    """
    known = without_none(totals_G)
    if len(known) < 2:
        return None
    means = known if rewards_G is None else without_none(rewards_G)
    return chance_of(known) or float(teaches), fmean(means)


MEMORY = 0.97  # weight that an observation keeps when the next one comes: about the last 33 groups count
_REUSED_ROUNDS = 4  # whose groups are kept to be trained on again
_NEVER_SOLVED = -1e30  # a mean below those of rewards that are negative too
LEAST = 0.05  # lower bound of the estimated yield, so that one bad stretch does not start a flood of groups


def attention_cost(config: Record) -> float:
    """The cost of a token's attention to another, in products of a token with all weights, from a config.json; 0 where
    it does not say the model's sizes.

    A layer's products with keys and values take `4 * query_size` operations for each pair of tokens, those with the
    weights 2 for each weight and token (arXiv 2001.08361, section 2.1).
    """
    try:
        facts = facts_of(config, name="the policy")
    except ModelError:
        return 0.0
    weights = facts.linear_params + facts.head_params
    return 2 * facts.num_hidden_layers * facts.query_size / weights


class ExpectedLengths:
    """Recent costs of each prompt's completions, by row. Prompts that are likely long are started first.

    Every rank has the same memory, and a resumed run has it too: which requests share a batch follows from it.
    """

    def __init__(self) -> None:
        self._of: dict[int, float] = {}
        self._mean = 0.0

    def of(self, row: int) -> float:
        """Return the row's expected cost; the mean of all rows for a new prompt."""
        return self._of.get(row, self._mean)

    def learn(self, costs: Iterable[tuple[int, float]]) -> None:
        """Learn from the row and the cost of each group of a round."""
        for row, cost in costs:
            before = self._of.get(row, cost)
            self._of[row] = before + (1 - _MEMORY) * (cost - before)
        self._mean = fmean(self._of.values()) if self._of else 0.0

    def state_dict(self) -> list[Any]:
        return [list(row_and_cost) for row_and_cost in self._of.items()]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        self._of = dict(state)
        self.learn(())  # their mean


@dataclass(frozen=True)
class Rules:
    """How a round samples.

    Args:
        dynamic: draw another prompt for a group that cannot teach; False trains on every group as it comes.
        max_tries: groups drawn for each one needed, at most; then the step goes on with what was written.
        teaches_alone: every scored completion teaches, whatever its group's others got (a critic, groups of one).
        greedy_baseline: also write and score each prompt's greedy completion, ReMax's baseline. It is not trained on.
        attention_cost: see `attention_cost`; training on a group then costs every rank about the same.
        environments: names of several, or of several datasets, whose rewards are told apart.
        num_prompts: prompts of the dataset; a round then draws no more than what is left to learn in them.
        in_order: take groups as they were drawn, not as they end: then the draws do not depend on how long each takes.
        max_in_flight: groups that this rank's engines can write at once. More stay unclaimed, for a rank that is free.
        oversample: groups in flight for each that is expected to be needed. Above 1 a round is over as soon as it has
            enough, and what is not whole goes on in the next (`rollout.turns`).
        reuse: share of a round's groups that come from the last rounds (`ReuseBuffer`).
        min_stds_R: standard deviations of rewards below which they do not teach (`group_rewards.min_stds`).
        normalizes_each: see `group_rewards.normalizes_each_reward`.
    """

    group_size: int
    seed: int
    reward_weights: tuple[float, ...]
    dynamic: bool = False
    max_tries: int = 4
    teaches_alone: bool = False
    greedy_baseline: bool = False
    attention_cost: float = 0.0
    num_prompts: int | None = None
    environments: tuple[str, ...] = ()
    constraints: Constraints | None = None
    in_order: bool = False
    max_in_flight: int | None = None
    oversample: float = 1.0
    reuse: float = 0.0
    min_stds_R: tuple[float, ...] | None = None
    normalizes_each: bool = False

    def cost_of(self, group: Group) -> int:
        """The cost of training on a group, in tokens of a short one: attention is quadratic in length."""
        sizes = [
            (len(sequence.prompt_ids), sequence.stop - sequence.start)
            for sequence in group.sequences
        ]
        return round(
            sum(
                length * (1 + self.attention_cost * (prompt + length / 2))
                for prompt, length in sizes
            )
        )

    def can_teach(self, group: Group) -> bool:
        """Return whether a group teaches in a run with these rules (`group_rewards.can_teach`)."""
        return can_teach(
            group,
            self.reward_weights,
            alone=self.teaches_alone,
            min_stds_R=self.min_stds_R,
            constraints=self.constraints,
            normalizes_each=self.normalizes_each,
        )

    def stats_of(self, group: Group, *, teaches: bool) -> tuple[float, float] | None:
        """Return a group's chance to teach, and its mean reward, as `stats_of`.

        A gate of constraints has the mean 0.5 whether all answers are right or wrong. So the mean is that of the rewards
        themselves, with 0 for a completion that breaks a constraint; where all do, the prompt is never solved.
        """
        gated_G = compared_rewards(group, self.reward_weights, self.constraints)
        rewards_G = None
        if self.constraints is not None and self.constraints.by == "gate":
            totals_G = compared_rewards(group, self.reward_weights)
            reward_if_broken = 0.0 if any(gated_G) else _NEVER_SOLVED
            by_gated = {None: None, 0.0: reward_if_broken}
            rewards_G = [
                by_gated.get(gated, total)
                for gated, total in zip(gated_G, totals_G, strict=True)
            ]
        return stats_of(gated_G, rewards_G, teaches=teaches)


@dataclass
class AcceptanceRate:
    """A moving average of the share of groups that can teach; it starts at 1."""

    kept: float = 1.0
    finished: float = 1.0

    @property
    def rate(self) -> float:
        return max(LEAST, self.kept / self.finished)

    def left(self, num_prompts: int) -> int:
        """Return how many of `num_prompts` prompts are expected to yield a trainable group."""
        return math.ceil(self.kept / self.finished * num_prompts)

    def state_dict(self) -> JsonObject:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        vars(self).update(state)

    def observe(self, *, taught: bool) -> None:
        self.kept = self.kept * MEMORY + float(taught)
        self.finished = self.finished * MEMORY + 1.0


def num_to_draw(
    *, need: int, kept: int, in_flight: int, drawn: int, max_draws: int, rate: float
) -> int:
    """Groups to start now, so that those in flight are expected to yield what is missing, at this `rate` above 0."""
    missing = need - kept
    if missing <= 0:
        return 0
    return max(0, min(math.ceil(missing / rate - 1e-9) - in_flight, max_draws - drawn))


class Quota:
    """How many groups this rank still starts in a round, from counts over all ranks.

    Args:
        need: groups of a round that each rank trains on; this one has `ready` of them, and writes `num_writing`.
        num_rounds: how many rounds, this one and later ones, may be begun now.
    """

    def __init__(
        self,
        rules: Rules,
        acceptance: AcceptanceRate,
        peers: Peers,
        *,
        need: int,
        ready: int,
        num_writing: int,
        num_rounds: Callable[[], int],
    ) -> None:
        self._rules = rules
        self._acceptance = acceptance
        self._world = peers.world
        self._num_rounds = num_rounds
        # Every rank starts its own share before it knows of any other.
        counts = Counts(ready, num_writing, num_writing)
        self._first: int | None = self._room(self._num_wanted(need, counts), num_writing)
        self._tally = peers.open_tally(need=need, ready=ready, starts=num_writing + self._first)
        self._counts = self._tally.add()

    def finish(self, items: Sequence[Finished], *, num_stale: int) -> None:
        """Count groups that are whole. Those that are too old to be trained on count as never drawn."""
        kept = sum(item.teaches or not self._rules.dynamic for item in items)
        in_flight = -len(items) - num_stale
        self._tally.add(kept=kept, in_flight=in_flight, drawn=-num_stale)

    def claim(self, *, num_writing: int) -> int | None:
        """Groups to start now beside the `num_writing` that this rank writes; None when its round is over."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        counts = self._tally.add()
        num_taught = counts.kept - self._counts.kept
        # The groups of all ranks, so that all ranks expect the same yield and want the same number.
        for index in range(counts.finished - self._counts.finished):
            self._acceptance.observe(taught=index < num_taught)
        self._counts = counts
        if self._excess > 1 and counts.kept >= self._tally.need:
            return None
        wanted = self._num_wanted(self._tally.need, counts)
        if (
            not num_writing
            and not wanted
            and (counts.kept >= self._tally.need or not counts.in_flight)
        ):
            return None
        return self._take(wanted, num_writing)

    def _num_wanted(self, need: int, counts: Counts) -> int:
        """Where fewer prompts than needed can still teach, the draws that find those are all that is worth their time:
        the round fills up with what it has."""
        rules = self._rules
        need = math.ceil(need * self._excess)
        num_to_find = need
        if rules.num_prompts is not None:
            num_to_find = min(need, self._acceptance.left(rules.num_prompts))
        return num_to_draw(
            need=need,
            kept=counts.kept,
            in_flight=counts.in_flight,
            drawn=counts.drawn,
            max_draws=max(need, num_to_find * rules.max_tries) if rules.dynamic else need,
            rate=self._acceptance.rate if rules.dynamic else 1.0,
        )

    @property
    def _excess(self) -> float:
        """Groups to have, whole or in flight, for each that the round needs."""
        return max(self._rules.oversample, self._num_rounds())

    def _take(self, wanted: int, num_writing: int) -> int:
        """This rank's part of the groups that all ranks want, less what other ranks took at the same moment."""
        amount = self._room(math.ceil(wanted / self._world), num_writing)
        if amount == 0:
            return 0
        counts = self._tally.add(in_flight=amount, drawn=amount)
        all_wanted = self._num_wanted(self._tally.need, Counts(counts.kept, 0, counts.finished))
        over = min(amount, max(0, counts.in_flight - all_wanted))
        if over:
            self._tally.add(in_flight=-over, drawn=-over)
        return amount - over

    def _room(self, amount: int, num_writing: int) -> int:
        limit = self._rules.max_in_flight
        return amount if limit is None else max(0, min(amount, limit - num_writing))


@dataclass(eq=False)
class LeftoverGroups:
    """Groups that can teach and were more than a round needed. They start the next one, if they are not too old."""

    max_age: int  # policy versions
    waiting: list[Finished] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.waiting)

    def state_dict(self) -> list[JsonObject]:
        return [to_json(item) for item in self.waiting]

    def load_state_dict(self, state: Sequence[Record]) -> None:
        self.waiting = [from_json(Finished, item) for item in state]

    def put(self, finished: Sequence[Finished]) -> None:
        self.waiting += [
            replace(item, stats=None) for item in finished if item.teaches
        ]  # one stats a group

    def take(self, version: int) -> list[Finished]:
        """Remove all groups, and return those young enough for this version of the policy."""
        waiting, self.waiting = self.waiting, []
        return [item for item in waiting if item.group.first_version >= version - self.max_age]


class ReuseBuffer:
    """The groups of the last rounds, of which those whose rewards differ most are trained on once more.

    All ranks have as many, because a round gives each the same number.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._groups: list[Group] = []  # the newest last

    def num_ready(self, num_groups: int) -> int:
        """Return how many of a round's groups are to come from here."""
        return min(int(self._rules.reuse * num_groups), len(self._groups))

    def take(self, number: int) -> list[Group]:
        """Remove and return those whose rewards differ most."""
        self._groups.sort(key=self._deviation)  # of equal ones, the newest last
        first = len(self._groups) - number
        taken = self._groups[first:]
        del self._groups[first:]
        self._groups.sort(key=lambda group: group.first_version)
        return taken

    def put(self, groups: Sequence[Group]) -> None:
        if self._rules.reuse:
            self._groups = [*self._groups, *groups][-_REUSED_ROUNDS * len(groups) :]

    def state_dict(self) -> list[JsonObject]:
        return [to_json(group) for group in self._groups]

    def load_state_dict(self, state: Sequence[Record]) -> None:
        self._groups = [from_json(Group, group) for group in state]

    def _deviation(self, group: Group) -> float:
        rewards = compared_rewards(group, self._rules.reward_weights, self._rules.constraints)
        return pstdev(without_none(rewards) or [0.0])


class Shard(NamedTuple):
    """Rank `rank` of `world` owns every `world`th of the positions that are to come, from the `rank`th on.

    Those are `gaps`, which an earlier number of ranks had not drawn, and then `start`, `start` + 1, ...
    """

    rank: int = 0
    world: int = 1
    gaps: tuple[int, ...] = ()
    start: int = 0

    def position(self, index: int) -> int:
        place = index * self.world + self.rank
        return (
            self.gaps[place] if place < len(self.gaps) else self.start + place - len(self.gaps)
        )


WHOLE = Shard()


@dataclass(eq=False)
class DrawSource:
    """Draws a rank's prompts in the run's order, or with the seed None in the order of the rows.

    `encode` returns a prompt's token ids. `cursor` counts the positions of `shard` that are past: drawn, or left out by
    the curriculum. Both may be set.
    """

    prompts: Sequence[Prompt]
    _: KW_ONLY
    seed: int | None
    encode: Callable[[Prompt], tuple[int, ...]]
    max_prompt_tokens: int
    shard: Shard = WHOLE
    curriculum: Curriculum | None = None
    cursor: int = field(default=0, init=False)

    def row_at(self, position: int) -> int:
        if self.seed is None:
            return position % len(self.prompts)
        return row_at(self.prompts, self.seed, position)

    def _takes(self, position: int) -> bool:
        return self.curriculum is None or self.curriculum.takes(position, self.row_at(position))

    def state_dict(self) -> JsonObject:
        return {"cursor": self.cursor, "gaps": list(self.shard.gaps), "start": self.shard.start}

    def load_state_dict(self, state: Record) -> None:
        self.shard = self.shard._replace(gaps=tuple(state["gaps"]), start=state["start"])
        self.cursor = state["cursor"]

    def draw(self) -> Draw:
        """The next prompt of this shard; DataError where it does not fit the engine's context."""
        last = self.cursor + len(
            self.prompts
        )  # there every prompt was dropped, and this one is as good as any
        while self.cursor < last and not self._takes(self.shard.position(self.cursor)):
            self.cursor += 1
        position = self.shard.position(self.cursor)
        prompt = self.prompts[self.row_at(position)]
        token_ids = self.encode(prompt)
        if not 0 < len(token_ids) <= self.max_prompt_tokens:
            raise DataError(
                f"row {prompt.row}: the prompt has {len(token_ids)} tokens, "
                f"between 1 and {self.max_prompt_tokens} fit; "
                "shorten it, lower --max-tokens, or raise engine.max_model_len"
            )
        self.cursor += 1
        return Draw(position=position, prompt=prompt, token_ids=token_ids)
