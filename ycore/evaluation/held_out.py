"""Evaluation: every prompt of a dataset once, as figures with intervals over prompts, and what a run does with them.

Figures: `reward`; `rewards/NAME` of each source; `pass@k`, the chance that one of k completions is right (Chen et al.
2021, arXiv 2107.03374); with constraints `cot-pass@k`, the chance that one of k is right and keeps them all, which with
a judge of the reasoning is CoT-pass@k (arXiv 2506.14245); `majority@n`, whether the answer that most of a prompt's n
completions give is right (Wang et al. 2022, arXiv 2203.11171). Right is what the first reward gives 1 or more.
Intervals are 95 % percentiles of the bootstrap over prompts (Efron 1979).
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ycore.config.algorithms import find_algorithm
from ycore.config.schema import AnyConfig, RewardConfig, RunConfig, TuneConfig, a_fifth
from ycore.errors import ConfigError, nearest
from ycore.rewards.answers import final_answer
from ycore.rewards.loading import reward_names
from ycore.run.metrics import EVALUATION, STEP_SECONDS, Row, is_evaluation, number, pass_at_k
from ycore.run.tasks import together
from ycore.scoring.constraints import constraints_of
from ycore.scoring.group_rewards import total_reward
from ycore.types import Draw, Group

if TYPE_CHECKING:
    from ycore.round.step import Controller

NO_GAIN, NOTHING_TO_LEARN, SECONDS = "no-gain", "nothing-to-learn", "seconds"
_RULES = {
    NO_GAIN: "evaluations without a new best",
    NOTHING_TO_LEARN: "steps without one group that can teach",
    SECONDS: "seconds of steps",
}

RIGHT_FROM = 1.0
"""The first reward of a completion that is right."""

_COMPARABLE = ("exact_answer", "numeric_answer", "math", "gym")
BOOTSTRAPS = 1000
_AT_ONCE = 64  # prompts in flight where the engines' own limit is not known

Table = npt.NDArray[np.float64]
"""A row for each prompt: what `_row` counts of its group."""

Counted = npt.NDArray[np.float64]
"""A number for each prompt."""


# -- what is measured --------------------------------------------------------------------------------------------------


def names_of(config: AnyConfig) -> list[str]:
    """The figures of an evaluation with these settings; the first is compared where the run names none."""
    if isinstance(config, TuneConfig):
        return list(find_algorithm(config.algorithm).figures)
    kinds = (
        ["pass", "cot-pass"] if any(reward.constraint for reward in config.rewards) else ["pass"]
    )
    passes = [f"{kind}@{k}" for kind in kinds for k in _ks(config.num_samples)]
    majority = (
        [f"majority@{config.num_samples}"] if _votes(config.rewards, config.num_samples) else []
    )
    return [
        "reward",
        *(f"rewards/{name}" for name in reward_names(config.rewards)),
        *passes,
        *majority,
    ]


def _ks(num_samples: int) -> list[int]:
    return [2**power for power in range(num_samples.bit_length())]


def _votes(rewards: Sequence[RewardConfig], num_samples: int) -> bool:
    """Whether answers can be compared: the first reward looks for a final answer, and there are several."""
    return num_samples > 1 and rewards[0].reward in _COMPARABLE


def measure(
    controller: "Controller", num_prompts: int, *, step: int, config: RunConfig
) -> dict[str, float]:
    """The figures of the policy whose weights the engines hold, over all ranks; all of them call this together."""
    rank, world = controller.peers.rank, controller.peers.world
    controller.draws.cursor = 0
    draws = [controller.draws.draw() for _ in range(rank, num_prompts, world)]
    groups = controller.run_round(_write(controller, draws, step), step=step, trains=False)
    table = np.zeros((num_prompts, _width(config)))
    for group in groups:
        table[group.draw.position] = _row(group, config)
    for meter in controller.scoring.meters:
        meter.take()  # not the next step's
    table = np.array(controller.peers.add_up(table.ravel().tolist())).reshape(table.shape)
    return figures(table, config)


async def _write(controller: "Controller", draws: Sequence[Draw], step: int) -> list[Group]:
    room = asyncio.Semaphore(controller.rules.max_in_flight or _AT_ONCE)

    async def one(draw: Draw) -> Group:
        async with room:
            return (await controller.group(draw, step=step)).group

    return await together([one(draw) for draw in draws])


def table_of(groups: Iterable[Group], config: RunConfig) -> Table:
    return np.array([_row(group, config) for group in groups])


def _width(config: RunConfig) -> int:
    return 7 + 2 * len(config.rewards)


def _row(group: Group, config: RunConfig) -> list[float]:
    """Completions scored and the sum of their rewards, the same of each source; right ones, and those of them that keep
    every constraint; the vote, tokens, cut off.

    A masked completion is left out of the means, and counts as wrong; an unscored constraint counts as broken.
    """
    weights = [reward.weight for reward in config.rewards]
    totals = [
        total for scores in group.scores_GR if (total := total_reward(scores, weights)) is not None
    ]
    row = [len(totals), sum(totals)]
    for source in range(len(weights)):
        values = [scores[source].value for scores in group.scores_GR]
        known = [value for value in values if value is not None]
        row += [len(known), sum(known)]
    is_right = [(scores[0].value or 0.0) >= RIGHT_FROM for scores in group.scores_GR]
    held = constraints_of(config)
    keeps = [all(one.is_broken(scores) is False for one in held) for scores in group.scores_GR]
    both = sum(right and kept for right, kept in zip(is_right, keeps, strict=True))
    answers = [final_answer(completion.text) for completion in group.completions]
    (winner, _), *_ = Counter(answers).most_common(
        1
    )  # of several with as many votes, the first that was written
    cut = sum(completion.finish_reason == "length" for completion in group.completions)
    return [*row, sum(is_right), both, is_right[answers.index(winner)], group.num_written, cut]


def figures(table: Table, config: RunConfig) -> dict[str, float]:
    """Each figure, and its interval as `NAME/low` and `NAME/high`; a figure that nothing was scored for is left out."""
    size = config.num_samples
    right, both, vote, tokens, cut = table[:, -5:].T
    numbers = {"pass": right, "cot-pass": both}
    ones = np.ones(len(table))
    parts = {"reward": (table[:, 1], table[:, 0])}
    for source, name in enumerate(reward_names(config.rewards)):
        parts[f"rewards/{name}"] = (table[:, 3 + 2 * source], table[:, 2 + 2 * source])
    for name in names_of(config)[len(parts) :]:
        kind, k = name.split("@")
        chances = (
            [pass_at_k(size, int(count), int(k)) for count in numbers[kind]]
            if kind in numbers
            else vote
        )
        parts[name] = (np.array(chances), ones)
    measured: dict[str, float] = {}
    for name, (sums, counts) in parts.items():
        measured |= with_interval(name, sums, counts)
    num = len(table) * size
    counted = {
        "mean_length": tokens.sum() / num,
        "cut_off": cut.sum() / num,
        "masked": num - table[:, 0].sum(),
    }
    return {name: float(value) for name, value in {**measured, **counted}.items()}


def with_interval(name: str, sums: Counted, counts: Counted) -> dict[str, float]:
    """The mean over prompts of which each has a sum of so many values, with its interval; nothing without a value."""
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


def pair_figures(groups: Sequence[Group], config: RunConfig) -> dict[str, float]:
    """`accuracy`: how often the better answer of a row has the higher reward, where equal ones count half; of each
    source too, where there are several, and `accuracy_gain`: its accuracy less that of the first, of the same pairs.
    A pair with a masked answer is left out, and counted in `masked`."""
    weights, names = [reward.weight for reward in config.rewards], reward_names(config.rewards)
    totals = [[total_reward(scores, weights) for scores in group.scores_GR] for group in groups]
    wins = {"accuracy": _wins(totals)}
    for source, name in enumerate(names if len(names) > 1 else ()):
        wins[f"accuracy/{name}"] = _wins(
            [[scores[source].value for scores in group.scores_GR] for group in groups]
        )
    for name in names[1:]:
        wins[f"accuracy_gain/{name}"] = wins[f"accuracy/{name}"] - wins[f"accuracy/{names[0]}"]
    measured: dict[str, float] = {}
    for figure, values in wins.items():
        measured |= with_interval(figure, np.nan_to_num(values), 1.0 - np.isnan(values))
    masked, equal = np.isnan(wins["accuracy"]).sum(), (wins["accuracy"] == 0.5).sum()
    return measured | {
        "equal": float(equal / max(1, len(totals) - masked)),
        "masked": float(masked),
    }


def _wins(pairs: Sequence[Sequence[float | None]]) -> Counted:
    """1 where the better answer has the higher reward, 0 where the lower, 0.5 where equal; NaN where one is masked."""
    return np.array(
        [
            np.nan
            if better is None or worse is None
            else (better > worse) + 0.5 * (better == worse)
            for better, worse in pairs
        ]
    )


# -- what follows from it ----------------------------------------------------------------------------------------------


def check_evaluation(config: RunConfig) -> None:
    """ConfigError for a figure, a rule or a reward that an evaluation of this run cannot have."""
    held_out = config.for_evaluation()
    if held_out is not None and config.replay is not None:
        raise ConfigError(
            "--eval-dataset needs engines, and a run with --replay starts none; leave one of them out"
        )
    more = {
        "--eval-while-training": config.eval_while_training,
        "--eval-reward": config.eval_rewards,
    }
    _check_asked(config, held_out, more, "name them, e.g. --eval-dataset test.jsonl")
    for spec in config.eval_rewards:
        if spec.reward.startswith(("judge:", "rm:", "teacher:")) and spec not in config.rewards:
            raise ConfigError(
                f"eval_rewards has {spec.reward}, and only models of the run's own rewards are served; "
                "give it as a reward too, with weight 0 if it is not to train"
            )


def check_measuring(config: TuneConfig, num_held_out: int) -> None:
    """The same for a run on given examples, of which so many are held out."""
    _check_asked(config, config if num_held_out else None, {}, "hold some out, e.g. --held-out 20")
    if any(name == NOTHING_TO_LEARN for name, _ in map(parse_rule, config.stop_when)):
        raise ConfigError(
            f"--stop-when {NOTHING_TO_LEARN} counts groups of completions, and ycore {config.algorithm} has none; "
            f"take {NO_GAIN}:N or {SECONDS}:N"
        )


def _check_asked(
    config: AnyConfig, measured: AnyConfig | None, more: Mapping[str, Any], way_out: str
) -> None:
    """Refuse what is asked of an evaluation. `measured`: the settings of one, None without rows to measure on."""
    rules = [name for name, _ in map(parse_rule, config.stop_when)]
    asking: dict[str, Any] = {
        "--keep-best": config.keep_best,
        "--eval-every": config.eval_every,
        **more,
    }
    asking["--stop-when no-gain"] = NO_GAIN in rules
    if measured is None:
        for option, value in asking.items():
            if value:
                raise ConfigError(f"{option} needs rows to measure on; {way_out}")
        return
    known = names_of(measured)
    if config.keep_best is not None and config.keep_best not in known:
        near = nearest(config.keep_best, known, limit=1)
        raise ConfigError(
            f"--keep-best takes a figure of the evaluation ({', '.join(known)}); it is {config.keep_best!r}{near}"
        )


def parse_rule(text: str) -> tuple[str, int]:
    """`no-gain:5` as its two parts; ConfigError."""
    name, _, count = text.partition(":")
    if name not in _RULES or not count.isdigit() or int(count) < 1:
        rules = ", ".join(f"{rule}:N ({of_what})" for rule, of_what in _RULES.items())
        raise ConfigError(
            f"--stop-when takes {rules}, N from 1; it is {text!r}; e.g. --stop-when {NO_GAIN}:5"
        )
    return name, int(count)


def is_due(step: int, every: int | None, steps: int) -> bool:
    """Before the first step, every so many, by default a fifth of the run, and after the last."""
    return step % (every or a_fifth(steps)) == 0 or step == steps


def watched(config: AnyConfig) -> str:
    """The metric by which evaluations are compared."""
    return EVALUATION + (config.keep_best or names_of(config)[0])


def worth(row: Row, metric: str) -> float:
    """What is higher for a better row: the value of the metric, or less the loss."""
    value = number(row, metric)
    return float("-inf") if value is None else -value if metric == f"{EVALUATION}loss" else value


def best_of(rows: Sequence[Row], metric: str) -> Row | None:
    """The first row with the best value."""
    known = [row for row in rows if number(row, metric) is not None]
    return max(known, key=lambda row: worth(row, metric), default=None)


def why_stop(rows: Sequence[Row], config: AnyConfig) -> str | None:
    """Why the run ends after these rows of its metrics, in words; None where it goes on."""
    for name, count in map(parse_rule, config.stop_when):
        if name == NO_GAIN:
            metric = watched(config)
            values = [worth(row, metric) for row in rows if number(row, metric) is not None]
            if values and len(values) - 1 - values.index(max(values)) >= count:
                best = best_of(rows, metric) or {}
                figure = f"{metric.removeprefix(EVALUATION)} {best[metric]:.4g}"
                return f"no gain in {count} evaluations over {figure} of step {best.get('step')}"
        elif name == SECONDS:
            seconds = [value for row in rows if (value := number(row, STEP_SECONDS[0])) is not None]
            if seconds and (spent := sum(seconds)) * (1 + 1 / len(seconds)) > count:
                return f"{len(seconds)} steps took {spent:.0f} s of {count}, and one more is likely to pass them"
        else:
            skipped = [row.get("ycore/skipped") for row in rows if "ycore/skipped" in row][-count:]
            if len(skipped) == count and all(skipped):
                return f"nothing to learn: {count} steps in a row had no group that can teach"
    return None


def as_metrics(measured: Mapping[str, float]) -> dict[str, float]:
    return {EVALUATION + name: value for name, value in measured.items()}


def figures_of(row: Row) -> dict[str, Any]:
    """The step of a row and what was measured, by the figures' own names."""
    values = {
        name.removeprefix(EVALUATION): row[name] for name in row if name.startswith(EVALUATION)
    }
    return {"step": row["step"], **values}


def report(rows: Sequence[Row], config: AnyConfig) -> dict[str, Any]:
    """What the run's summary says of its evaluations: the first, the last, and the best where it is kept."""
    measured = [row for row in rows if is_evaluation(row)]
    if not measured:
        return {}
    best = best_of(measured, watched(config)) if config.keep_best else None
    ends = {"before": figures_of(measured[0]), "after": figures_of(measured[-1])}
    return {"held_out": ends} | ({} if best is None else {"best": figures_of(best)})
