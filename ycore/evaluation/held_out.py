"""Evaluate every prompt of a dataset once: figures with intervals over prompts, and what a run decides by them.

Figures: `reward`; `rewards/NAME` of each source; `pass@k`, the chance that one of k completions is right (Chen et al.
2021, arXiv 2107.03374); with constraints `cot-pass@k`, the chance that one of k is right and keeps them all, which with
a judge of the reasoning is CoT-pass@k (arXiv 2506.14245); `majority@n`, whether the answer that most of a prompt's n
completions give is right (Wang et al. 2022, arXiv 2203.11171). A completion is right where the first reward gives 1 or
more. Intervals are 95 % percentiles of the bootstrap over prompts (Efron 1979).
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ycore.config.algorithms import find_algorithm
from ycore.config.schema import AnyConfig, RunConfig, TuneConfig, a_fifth
from ycore.errors import ConfigError, nearest
from ycore.rewards.answers import final_answer
from ycore.rewards.loading import reward_names
from ycore.run.metrics import EVALUATION, STEP_SECONDS, Row, number, pass_at_k
from ycore.run.tasks import together
from ycore.run.work import working
from ycore.scoring.group_rewards import compared_rewards, constraints_of, without_none
from ycore.types import Draw, Group, JsonObject, Metrics, Record

if TYPE_CHECKING:
    from ycore.round.step import Controller

NO_GAIN = "no-gain"
NOTHING_TO_LEARN = "nothing-to-learn"
SECONDS = "seconds"
_RULES = {
    NO_GAIN: "evaluations without a new best",
    NOTHING_TO_LEARN: "steps without one group that can teach",
    SECONDS: "seconds of steps",
}

RIGHT_FROM = 1.0
"""The first reward of a completion that is right."""

BOOTSTRAPS = 1000
_COMPARABLE = ("exact_answer", "numeric_answer", "math", "gym")
_PROMPTS_IN_FLIGHT = 64  # where the engines' own limit is not known
_EXTRAS = ("mean_length", "cut_off", "masked")

Table = npt.NDArray[np.float64]
"""Shape [prompts, figures, 2]: a sum and the count that it is divided by; figures as `figure_names`, then `_EXTRAS`."""

Values = npt.NDArray[np.float64]
"""A number for each prompt."""


# -- figures -----------------------------------------------------------------------------------------------------------


def figure_names(config: AnyConfig) -> list[str]:
    """Return the figures of an evaluation; the first is compared where the run names none."""
    if isinstance(config, TuneConfig):
        return list(find_algorithm(config.algorithm).figures)
    names = ["reward", *(f"rewards/{name}" for name in reward_names(config.rewards))]
    powers = [2**power for power in range(config.num_samples.bit_length())]
    names += [f"pass@{k}" for k in powers]
    if config.has_constraints:
        names += [f"cot-pass@{k}" for k in powers]
    # Where the first reward looks for a final answer, answers can be compared.
    if config.num_samples > 1 and config.rewards[0].reward in _COMPARABLE:
        names.append(f"majority@{config.num_samples}")
    if config.num_samples > 1:
        choosers = reward_names(config.rewards)[1:]
        names += [f"best@{config.num_samples}/{name}" for name in choosers]
    return names


def evaluate_policy(
    controller: "Controller", num_prompts: int, *, step: int, config: RunConfig
) -> Metrics:
    """Return the figures of the policy whose weights the engines hold, over all ranks, which call this together."""
    rank = controller.peers.rank
    world = controller.peers.world
    controller.draws.cursor = 0
    draws = [controller.draws.draw() for _ in range(rank, num_prompts, world)]
    groups = controller.run_round(
        write_groups(controller, draws, step=step), step=step, trains=False
    )
    table = np.zeros((num_prompts, len(figure_names(config)) + len(_EXTRAS), 2))
    for group in groups:
        table[group.draw.position] = _count_group(group, config)
    for meter in (*controller.scoring.meters, *controller.writer.meters):
        meter.take()  # not the next step's
    total = controller.peers.add_up(table.ravel().tolist())
    table = np.array(total).reshape(table.shape)
    figures = evaluation_figures(table, config)
    ends = np.cumsum(getattr(controller.draws.prompts, "sizes", []), dtype=int)
    for part, rows in zip(config.mixture, np.split(table, ends), strict=False):
        figures |= as_metrics(evaluation_figures(rows, config), f"{part.name}/")
    return figures


async def write_groups(
    controller: "Controller",
    draws: Sequence[Draw],
    *,
    step: int,
    tell: Callable[[Group], None] = lambda group: None,
) -> list[Group]:
    """Complete and score every prompt, as many at once as the engines have room for, and tell each group that is whole."""
    room = asyncio.Semaphore(controller.rules.max_in_flight or _PROMPTS_IN_FLIGHT)

    with working("evaluating", total=len(draws), unit="prompts") as work:

        async def write(draw: Draw) -> Group:
            async with room:
                group = (await controller.group(draw, step=step)).group
            tell(group)
            work.add()
            return group

        return await together([write(draw) for draw in draws])


def count_groups(groups: Iterable[Group], config: RunConfig) -> Table:
    return np.array([_count_group(group, config) for group in groups])


def _count_group(group: Group, config: RunConfig) -> list[tuple[float, float]]:
    """Return the sum and the count of every figure.

    A masked completion is left out of the means, and counts as wrong; an unscored constraint counts as broken. Of a
    dataset with rewards of its own, the first of these says what is right, and the others have no figures.
    """
    size = len(group.completions)
    totals = without_none(compared_rewards(group, config.reward_weights))
    sums: dict[str, tuple[float, float]] = {"reward": (sum(totals), len(totals))}
    for source, name in enumerate(reward_names(config.rewards)):
        values = without_none(rewards[source] for rewards in group.rewards_GR)
        sums[f"rewards/{name}"] = (sum(values), len(values))
    first = config.first_reward_of(group.draw.prompt.dataset)
    is_right = [(scores[first].value or 0.0) >= RIGHT_FROM for scores in group.scores_GR]
    num_right = {
        "pass": sum(is_right),
        "cot-pass": _num_right_and_kept(group, config, is_right),
    }
    for name in figure_names(config)[len(sums) :]:
        kind, k = name.split("@")
        if kind == "majority":
            is_comparable = config.rewards[first].reward in _COMPARABLE
            sums[name] = (_is_vote_right(group, is_right), 1) if is_comparable else (0.0, 0)
        elif kind == "best":
            sums[name] = _first_reward_of_best(group, config, chooser=name.partition("/")[2])
        else:
            sums[name] = (pass_at_k(size, num_right[kind], int(k)), 1)
    num_cut = sum(completion.finish_reason == "length" for completion in group.completions)
    extras = [(group.num_written, size), (num_cut, size), (size - len(totals), 1)]
    return [*sums.values(), *extras]


def _num_right_and_kept(group: Group, config: RunConfig, is_right: Sequence[bool]) -> int:
    """Count the right completions that keep every constraint of their dataset."""
    unscored = config.unscored.get(group.draw.prompt.dataset, set())
    constraints = [item for item in constraints_of(config) if item.source not in unscored]
    return sum(
        right and all(constraint.is_broken(rewards) is False for constraint in constraints)
        for right, rewards in zip(is_right, group.rewards_GR, strict=True)
    )


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Return the mean without the unknown values; None if none is known."""
    known = without_none(values)
    return sum(known) / len(known) if known else None


def mean_reward(groups: Iterable[Group], weights: Sequence[float]) -> float | None:
    """Return the mean of the weighted rewards; None if none is known."""
    return mean_of_known(
        total for group in groups for total in compared_rewards(group, weights)
    )


def _is_vote_right(group: Group, is_right: Sequence[bool]) -> bool:
    """Tell whether the most frequent answer is right; of several, the first that was written."""
    answers = [final_answer(completion.full_text) for completion in group.completions]
    (winner, _), *_ = Counter(answers).most_common(1)
    return is_right[answers.index(winner)]


def _first_reward_of_best(
    group: Group, config: RunConfig, *, chooser: str
) -> tuple[float, float]:
    """Return the first reward of the completion for which another reward is highest (best-of-n), and the count 1.

    It is 0 if that completion is masked; where the dataset has not both rewards, the count is 0.
    """
    dataset = group.draw.prompt.dataset
    first = config.first_reward_of(dataset)
    source = reward_names(config.rewards).index(chooser)
    if source in {first, *config.unscored.get(dataset, set())}:
        return (0.0, 0)
    best = max(
        group.scores_GR,
        key=lambda scores: (scores[source].value is not None, scores[source].value),
    )
    return (best[first].value or 0.0, 1)


def evaluation_figures(table: Table, config: RunConfig) -> Metrics:
    """Return each figure, with its interval as `NAME/low` and `NAME/high`.

    A figure for which nothing was scored is left out.
    """
    names = figure_names(config)
    figures: Metrics = {}
    for index, name in enumerate(names):
        figures |= with_interval(name, table[:, index, 0], table[:, index, 1])
    sums, counts = table[:, len(names) :].sum(axis=0).T
    length, cut_off, masked = sums
    figures["mean_length"] = float(length / counts[0])
    figures["cut_off"] = float(cut_off / counts[1])
    figures["masked"] = float(masked)
    return figures


def with_interval(name: str, sums: Values, counts: Values) -> Metrics:
    """Return the mean over prompts, of which each has a sum of so many values, with its interval; {} without a value."""
    if counts.sum() == 0:
        return {}
    drawn = np.random.default_rng(0).integers(0, len(sums), (BOOTSTRAPS, len(sums)))
    scored = counts[drawn].sum(axis=1)
    means = sums[drawn].sum(axis=1)[scored > 0] / scored[scored > 0]
    low, high = np.percentile(means, (2.5, 97.5))
    return {
        name: float(sums.sum() / counts.sum()),
        f"{name}/low": float(low),
        f"{name}/high": float(high),
    }


def pair_figures(groups: Sequence[Group], config: RunConfig) -> Metrics:
    """Return how often who scores agrees with pairs of a better and a worse answer.

    `accuracy`: how often the better answer of a row has the higher reward, where equal ones count half; of each source
    too, where there are several. A pair with a masked answer is left out, and counted in `masked`.
    """
    names = reward_names(config.rewards)
    totals = [compared_rewards(group, config.reward_weights) for group in groups]
    wins = {"accuracy": _count_wins(totals)}
    if len(names) > 1:
        for source, name in enumerate(names):
            values = [[rewards[source] for rewards in group.rewards_GR] for group in groups]
            wins[f"accuracy/{name}"] = _count_wins(values)
    figures: Metrics = {}
    for figure, won in wins.items():
        figures |= with_interval(figure, np.nan_to_num(won), 1.0 - np.isnan(won))
    num_masked = np.isnan(wins["accuracy"]).sum()
    num_equal = (wins["accuracy"] == 0.5).sum()
    figures["equal"] = float(num_equal / max(1, len(totals) - num_masked))
    figures["masked"] = float(num_masked)
    return figures


def _count_wins(pairs: Iterable[Sequence[float | None]]) -> Values:
    """Return 1 where the better answer has the higher reward, 0.5 where equal, 0 where lower; NaN where masked."""
    better, worse = np.array(list(pairs), float).reshape(-1, 2).T
    wins: Values = np.sign(better - worse) / 2 + 0.5
    return wins


# -- checks ------------------------------------------------------------------------------------------------------------


def check_evaluation(config: RunConfig) -> None:
    """Raise ConfigError for a figure, a rule or a reward that an evaluation of this run cannot have."""
    settings = config.for_evaluation()
    if settings is not None and config.replay is not None:
        raise ConfigError(
            "--eval-dataset needs engines, and a run with --replay starts none; leave one of them out"
        )
    more = {
        "--eval-reward": config.eval_rewards,
        "--eval-split": config.eval_split,
        "eval_limit": config.eval_limit,
    }
    _check_options(config, settings, more, "name them, e.g. --eval-dataset test.jsonl")
    always = config.learns_from_equal_rewards
    if always and any(
        name == NOTHING_TO_LEARN for name, _ in map(parse_rule, config.stop_when)
    ):
        raise ConfigError(
            f"--stop-when {NOTHING_TO_LEARN} counts steps without a gradient, and with {always} each has one; "
            f"take {NO_GAIN}:N or {SECONDS}:N"
        )
    for spec in config.eval_rewards:
        if spec.kind in ("judge:", "rm:", "teacher:") and spec not in config.rewards:
            raise ConfigError(
                f"eval_rewards has {spec.reward}, and only models of the run's own rewards are served; "
                "give it as a reward too, with weight 0 if it is not to train"
            )


def check_measuring(config: TuneConfig, num_held_out: int) -> None:
    """Raise ConfigError for what a run on given examples cannot have; `num_held_out` rows are held out."""
    _check_options(
        config, config if num_held_out else None, {}, "hold some out, e.g. --held-out 20"
    )
    if any(name == NOTHING_TO_LEARN for name, _ in map(parse_rule, config.stop_when)):
        raise ConfigError(
            f"--stop-when {NOTHING_TO_LEARN} counts groups of completions, and ycore {config.algorithm} has none; "
            f"take {NO_GAIN}:N or {SECONDS}:N"
        )


def _check_options(
    config: AnyConfig, settings: AnyConfig | None, more: Record, way_out: str
) -> None:
    """Refuse options that need an evaluation; `settings` are those of one, None without rows to measure on."""
    rules = [name for name, _ in map(parse_rule, config.stop_when)]
    options: JsonObject = {
        "--keep-best": config.keep_best,
        "--eval-every": config.eval_every,
        **more,
        "--stop-when no-gain": NO_GAIN in rules,
    }
    if settings is None:
        for option, value in options.items():
            if value:
                raise ConfigError(f"{option} needs rows to measure on; {way_out}")
        return
    known = figure_names(settings)
    if config.keep_best is not None and config.keep_best not in known:
        near = nearest(config.keep_best, known, limit=1)
        raise ConfigError(
            f"--keep-best takes a figure of the evaluation ({', '.join(known)}); it is {config.keep_best!r}{near}"
        )


def parse_rule(text: str) -> tuple[str, int]:
    """Split `no-gain:5` into its two parts; ConfigError."""
    name, _, count = text.partition(":")
    if name not in _RULES or not count.isdigit() or int(count) < 1:
        rules = ", ".join(f"{rule}:N ({unit})" for rule, unit in _RULES.items())
        raise ConfigError(
            f"--stop-when takes {rules}, N from 1; it is {text!r}; e.g. --stop-when {NO_GAIN}:5"
        )
    return name, int(count)


# -- decisions ---------------------------------------------------------------------------------------------------------


def is_due(step: int, every: int | None, steps: int) -> bool:
    """Tell whether to evaluate: before the first step, every so many (by default a fifth), and after the last."""
    return step % (every or a_fifth(steps)) == 0 or step == steps


def watched_metric(config: AnyConfig) -> str:
    """Return the metric by which evaluations are compared."""
    return EVALUATION + (config.keep_best or figure_names(config)[0])


def metric_score(row: Row, metric: str) -> float:
    """Return a number that is higher for a better row: the metric, or less the loss."""
    value = number(row, metric)
    if value is None:
        return float("-inf")
    return -value if metric == f"{EVALUATION}loss" else value


def best_of(rows: Sequence[Row], metric: str) -> Row | None:
    """Return the first row with the best value."""
    known = [row for row in rows if number(row, metric) is not None]
    return max(known, key=lambda row: metric_score(row, metric), default=None)


def why_stop(rows: Sequence[Row], config: AnyConfig) -> str | None:
    """Say why the run ends after these rows of its metrics; None where it goes on."""
    checks = {NO_GAIN: _no_gain, SECONDS: _no_time, NOTHING_TO_LEARN: _nothing_to_learn}
    for name, count in map(parse_rule, config.stop_when):
        if reason := checks[name](rows, count, config):
            return reason
    return None


def _no_gain(rows: Sequence[Row], count: int, config: AnyConfig) -> str | None:
    metric = watched_metric(config)
    best = best_of(rows, metric)
    if best is None:
        return None
    evaluations = [row for row in rows if number(row, metric) is not None]
    if len(evaluations) - 1 - evaluations.index(best) < count:
        return None
    figure = f"{metric.removeprefix(EVALUATION)} {best[metric]:.4g}"
    return f"no gain in {count} evaluations over {figure} of step {best.get('step')}"


def _no_time(rows: Sequence[Row], count: int, config: AnyConfig) -> str | None:
    seconds = without_none(number(row, STEP_SECONDS[0]) for row in rows)
    if not seconds or sum(seconds) * (1 + 1 / len(seconds)) <= count:
        return None
    return f"{len(seconds)} steps took {sum(seconds):.0f} s of {count}, and one more is likely to pass them"


def _nothing_to_learn(rows: Sequence[Row], count: int, config: AnyConfig) -> str | None:
    skipped = [row["ycore/skipped"] for row in rows if "ycore/skipped" in row][-count:]
    if len(skipped) < count or not all(skipped):
        return None
    return f"nothing to learn: {count} steps in a row had no group that can teach"


def as_metrics(figures: Mapping[str, float], prefix: str = EVALUATION) -> Metrics:
    return {prefix + name: value for name, value in figures.items()}


def row_figures(row: Row) -> JsonObject:
    """Return the step of a row and its figures, by their own names."""
    figures = {
        name.removeprefix(EVALUATION): row[name] for name in row if name.startswith(EVALUATION)
    }
    return {"step": row["step"], **figures}


def first_and_last(evaluations: Sequence[Row]) -> JsonObject:
    """Return the first of these evaluations and the last."""
    ends = {"before": row_figures(evaluations[0]), "after": row_figures(evaluations[-1])}
    return {"held_out": ends}
