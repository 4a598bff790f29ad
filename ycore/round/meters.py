"""Counts of a round on this rank, which are added up over all ranks and become the step's metrics."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass

from ycore.engine import Engine
from ycore.errors import RunError
from ycore.round.peers import Peers
from ycore.run.metrics import Meter
from ycore.scoring.group_rewards import compared_rewards, without_none
from ycore.types import Group, Metrics


def collect(
    meters: Sequence[Meter], add_up: Callable[[Sequence[float]], list[float]]
) -> Metrics:
    """Return the metrics of all meters over all ranks, by one collective."""
    taken = [meter.take() for meter in meters]
    flat = [value for counts in taken for value in counts]
    sums = add_up(flat)
    metrics: Metrics = {}
    for meter, counts in zip(meters, taken, strict=True):
        metrics |= meter.metrics(sums[: len(counts)])
        sums = sums[len(counts) :]
    return metrics


@dataclass(eq=False)
class RoundMeter:
    """Counts completions and scores of this rank in the round under way, or in the last one."""

    engines: Sequence[Engine]
    peers: Peers
    leftover_groups: Sized
    environments: Sequence[str] = ()
    requires_scores: bool = True  # a preflight reports a step without any

    def __post_init__(self) -> None:
        self._bytes_reported = self.peers.bytes_sent
        self._restarts_reported = 0
        self.begin()

    def begin(self) -> None:
        self.drawn = self.stale = self.num_tokens = self.num_masked = 0
        # Of all completions, then of those in each of several datasets or environments.
        self.rewards: dict[str, list[float]] = {name: [] for name in ("", *self.environments)}
        self.problems: Counter[str] = Counter()
        self.generate_s = self.seconds = 0.0
        self._began = time.perf_counter()

    def note_written(self) -> None:
        self.generate_s = time.perf_counter() - self._began

    def count(self, group: Group, weights_R: Sequence[float]) -> None:
        totals = compared_rewards(group, weights_R)
        known = without_none(totals)
        self.num_tokens += group.num_written
        self.num_masked += totals.count(None)
        self.rewards[""] += known
        if self.environments:
            prompt = group.draw.prompt
            self.rewards[prompt.dataset or prompt.columns["environment"]] += known
        self.problems.update(
            score.problem for scores_R in group.scores_GR for score in scores_R if score.problem
        )

    def end(self) -> None:
        self.seconds = time.perf_counter() - self._began

    def take(self) -> Sequence[float]:
        moved = self.peers.bytes_sent - self._bytes_reported
        self._bytes_reported += moved
        restarts = sum(engine.restarts for engine in self.engines) - self._restarts_reported
        self._restarts_reported += restarts
        counts: list[float] = [self.num_tokens, self.num_masked, self.problems.total()]
        counts += [self.drawn, len(self.leftover_groups), moved, restarts, self.stale]
        for rewards in self.rewards.values():
            # Exact, so that the order in which groups finish does not matter.
            counts += [math.fsum(rewards), len(rewards)]
        return counts

    def metrics(self, sums: Sequence[float]) -> Mapping[str, float]:
        num_tokens, num_masked, num_failed, drawn, leftover, moved, restarts, stale = sums[:8]
        self.check_scored(sums[9], num_masked, num_failed)
        metrics = {
            "ycore/tokens_per_s": num_tokens / self.seconds,
            "ycore/masked": num_masked,
            "ycore/sampling/drawn": drawn,
            "ycore/sampling/surplus": leftover,
            "ycore/sampling/stale": stale,
            "ycore/bytes_moved": moved,
            "ycore/engine_restarts": restarts,
        }
        for name, total, number in zip(self.rewards, sums[8::2], sums[9::2], strict=True):
            if number:
                metrics[f"ycore/reward/{name}".rstrip("/")] = total / number
        return metrics

    def check_scored(self, num_scored: float, num_masked: float, num_failed: float) -> None:
        """Raise RunError where no reward could score any completion, though nothing else masks them."""
        if not self.requires_scores or num_scored or not 0 < num_masked <= num_failed:
            return
        problem, _ = next(iter(self.problems.most_common(1)), ("of another rank", 0))
        raise RunError(
            f"a step needs a completion that a reward can score, and all {num_masked:g} failed ({problem}); "
            "correct the reward or what it needs (logs/rewards.log has its output), then resume the run"
        )

    def own_metrics(self, *, rate: float, syncs: bool) -> Metrics:
        """Return the metrics that are not summed over ranks.

        `rate` is the expected yield, `syncs` whether engines are sent weights.
        """
        metrics = {"ycore/time/generate": self.generate_s, "ycore/sampling/yield": rate}
        home = [engine for engine in self.engines if engine.is_home]
        if syncs and home:
            metrics["ycore/sync_proved"] = home[-1].verified_share
        return metrics
