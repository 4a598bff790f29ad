"""The figures of an evaluation against values computed by hand, and what a run decides by them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ycore.config.learners import PPOConfig
from ycore.config.schema import EvalConfig, RewardConfig, RunConfig, TuneConfig
from ycore.data.prompts import load_prompts
from ycore.errors import ConfigError
from ycore.evaluation.held_out import (
    best_of,
    check_evaluation,
    check_measuring,
    count_groups,
    evaluate_policy,
    evaluation_figures,
    figure_names,
    first_and_last,
    is_due,
    mean_reward,
    pair_figures,
    watched_metric,
    why_stop,
)
from ycore.rewards.answers import final_answer
from ycore.rollout.turns import TurnMeter
from ycore.round.sampling import LEAST, AcceptanceRate, DrawSource, Shard, num_to_draw
from ycore.types import Completion, Draw, Group, Prompt, Score


def config(**settings: Any) -> RunConfig:
    base = {
        "model": "m",
        "dataset": "d",
        "output": "o",
        "rewards": [{"reward": "exact_answer"}],
        "num_samples": 4,
    }
    config_class = EvalConfig if "pairs" in settings else RunConfig
    if settings.get("algorithm") == "ppo":
        config_class = PPOConfig
    return config_class.model_validate({**base, **settings})


def group(position: int, texts: Sequence[str], rewards: Sequence[float | None]) -> Group:
    completions = tuple(
        Completion((1, 2), None, text, "stop" if text else "length", 0) for text in texts
    )
    draw = Draw(position, Prompt(position, "p"), (1,))
    return Group(draw, completions, tuple((Score(reward),) for reward in rewards))


GROUPS = [
    group(
        0, ["It is 7", "7", "8", "the answer: 9"], [1.0, 1.0, 0.0, 0.0]
    ),  # the vote is 7, and right
    group(1, ["3", "4", "4.", "four"], [1.0, 0.0, 0.0, 0.0]),  # 4, and wrong
    group(2, ["1", "", "", "2"], [None, 0.0, 0.0, 0.0]),  # no answer at all
]


def test_figures_of_three_prompts() -> None:
    figures = evaluation_figures(count_groups(GROUPS, config()), config())
    assert figures["reward"] == figures["rewards/exact_answer"] == pytest.approx(3 / 11)
    assert figures["pass@1"] == pytest.approx((2 / 4 + 1 / 4 + 0) / 3)
    assert figures["pass@2"] == pytest.approx(((1 - 1 / 6) + 1 / 2 + 0) / 3)
    assert figures["pass@4"] == pytest.approx(2 / 3) and figures["majority@4"] == pytest.approx(
        1 / 3
    )
    assert (
        figures["masked"] == 1
        and figures["cut_off"] == pytest.approx(2 / 12)
        and figures["mean_length"] == 2
    )
    assert figures["pass@4/low"] == 0.0 and figures["pass@4/high"] == 1.0


@pytest.mark.parametrize("rank", [0, 1])
def test_each_dataset_of_several_has_figures_of_its_own(rank: int, tmp_path: Path) -> None:
    """Two ranks measure rows 0 and 2 of the first dataset and the one of the second, and row 1."""
    for name, count in (("sums.jsonl", 2), ("talk.jsonl", 1)):
        rows = "".join(
            json.dumps({"prompt": f"{n}?", "answer": "7"}) + "\n" for n in range(count)
        )
        (tmp_path / name).write_text(rows)
    parts = [
        {"dataset": name, "eval_dataset": str(tmp_path / name)}
        for name in ("sums.jsonl", "talk.jsonl")
    ]
    settings = config(mixture=parts).for_evaluation()
    assert settings is not None
    draws = DrawSource(
        load_prompts(settings).prompts,
        seed=None,
        encode=lambda _: (1,),
        max_prompt_tokens=1,
        shard=Shard(rank, 2),
    )
    other = count_groups(GROUPS, settings)
    other[rank::2] = 0.0  # what the other rank adds
    measured: list[str | None] = []

    def run_round(writing: Any, **_: Any) -> list[Group]:
        writing.close()
        mine = GROUPS[rank::2]
        measured.extend(
            draws.prompts[measured_group.draw.position].dataset for measured_group in mine
        )
        return mine

    controller: Any = SimpleNamespace(
        peers=SimpleNamespace(
            rank=rank,
            world=2,
            add_up=lambda values: [*map(sum, zip(values, other.ravel(), strict=True))],
        ),
        draws=draws,
        run_round=run_round,
        scoring=SimpleNamespace(meters=[]),
        writer=SimpleNamespace(meters=[meter := TurnMeter(calls=3)]),
        rules=SimpleNamespace(max_in_flight=1),
    )
    figures = evaluate_policy(controller, 3, step=0, config=settings)
    assert meter.calls == 0, "the next step would count its tools' calls"
    assert measured == (["sums.jsonl", "talk.jsonl"] if rank == 0 else ["sums.jsonl"])
    assert figures["reward"] == pytest.approx(3 / 11)
    assert figures["sums.jsonl/reward"] == pytest.approx(3 / 8)
    assert figures["sums.jsonl/pass@1"] == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert figures["talk.jsonl/reward"] == figures["talk.jsonl/pass@4"] == 0
    assert figures["talk.jsonl/masked"] == 1 and figures["sums.jsonl/masked"] == 0
    assert figures["sums.jsonl/pass@1/low"] == 0.25


def test_the_best_of_n_by_another_reward() -> None:
    """It is the first reward of what the others prefer: of equal ones the first, and of masked ones none."""
    rewards = [{"reward": name} for name in ("exact_answer", "similarity", "length")]
    settings = config(rewards=rewards)
    assert figure_names(settings)[-2:] == ["best@4/similarity", "best@4/length"]
    assert "best@" not in str(figure_names(config(rewards=rewards, num_samples=1)))
    scored = [
        [(0.0, 0.1, 9.0), (1.0, 0.8, None), (0.5, 0.8, 9.0), (0.0, None, 1.0)],
        [(1.0, 0.2, 0.0), (None, 0.9, -1.0), (0.0, None, None), (0.0, 0.3, -2.0)],
    ]
    groups = [
        replace(
            GROUPS[0],
            draw=replace(GROUPS[0].draw, position=position),
            scores_GR=tuple(tuple(map(Score, scores)) for scores in scores_GR),
        )
        for position, scores_GR in enumerate(scored)
    ]
    measured = evaluation_figures(count_groups(groups, settings), settings)
    assert measured["best@4/similarity"] == (1.0 + 0.0) / 2
    assert measured["best@4/length"] == (0.0 + 1.0) / 2
    assert measured["best@4/similarity/low"] == 0.0


def test_the_mean_while_it_goes_on_is_of_all_rewards_by_their_weights() -> None:
    """It was of the first one alone."""
    draw = group(0, "a", [0.0]).draw
    completions = group(0, "ab", [0.0, 0.0]).completions
    scores = ((Score(0.0), Score(1.0)), (Score(None), Score(0.5)))
    assert mean_reward([Group(draw, completions, scores)], (1.0, 2.0)) == 1.5
    assert mean_reward([group(0, "a", [None])], (1.0,)) is None


def test_of_a_dataset_its_own_first_reward_says_what_is_right() -> None:
    """Two of four are right by `math`, which alone scores the dataset; the other figures are not of it."""
    names = ("exact_answer", "math", "format")
    rewards = [{"reward": name, "constraint": name == "format"} for name in names]
    parts = [{"dataset": "a", "rewards": ["math"]}, {"dataset": "b"}]
    settings = config(algorithm="eval", pairs=False, rewards=rewards, mixture=parts)
    prompt = Prompt(0, "p", dataset="a")
    scores = tuple((Score(None), Score(value), Score(None)) for value in (1.0, 1.0, 0.0, 0.0))
    measured = replace(GROUPS[0], draw=Draw(0, prompt, (1,)), scores_GR=scores)
    figures = evaluation_figures(count_groups([measured], settings), settings)
    assert figures["reward"] == figures["pass@1"] == figures["cot-pass@1"] == 0.5
    assert figures["majority@4"] == 1.0
    assert not {"best@4/math", "best@4/format", "rewards/exact_answer"} & set(figures)


def test_right_by_right_reasons() -> None:
    """A judge of the reasoning accepts one of four right completions, rejects two, and gives one no verdict."""
    scores = [
        (1.0, 1.0),
        (1.0, 0.4),
        (1.0, 0.0),
        (1.0, None),
        (0.0, 1.0),
        (0.0, 1.0),
        (0.0, 0.0),
        (0.0, 0.0),
    ]
    completions = tuple(Completion((1, 2), None, "7", "stop", 0) for _ in scores)
    judged_group = Group(
        Draw(0, Prompt(0, "p"), (1,)),
        completions,
        tuple((Score(a), Score(b)) for a, b in scores),
    )
    rewards = [
        {"reward": "exact_answer"},
        {"reward": "judge:reasons", "constraint": True, "weight": 0.0},
    ]
    settings = config(rewards=rewards, num_samples=8)
    figures = evaluation_figures(count_groups([judged_group], settings), settings)
    assert (
        figures["pass@1"],
        figures["cot-pass@1"],
        figures["pass@8"],
        figures["cot-pass@8"],
    ) == (
        0.5,
        0.125,
        1.0,
        1.0,
    )
    assert figures["cot-pass@2"] == pytest.approx(1 - 21 / 28) and "cot-pass@4" in figure_names(
        settings
    )
    assert not any("cot" in name for name in figure_names(config()))


def test_how_often_a_reward_agrees_with_pairs() -> None:
    """Five pairs are right, equal, wrong, masked and right: 2.5 of 4."""
    rewards = [[2.0, 1.0], [0.5, 0.5], [0.0, 0.1], [None, 1.0], [-1.0, -2.0]]
    figures = pair_figures(
        [group(n, ["a", "b"], pair) for n, pair in enumerate(rewards)], config(pairs=True)
    )
    assert (figures["accuracy"], figures["equal"], figures["masked"]) == (0.625, 0.25, 1.0)
    assert 0 < figures["accuracy/low"] < 0.625 < figures["accuracy/high"] <= 1
    assert "accuracy/exact_answer" not in figures
    two = [
        RewardConfig(reward="exact_answer", weight=-1),
        RewardConfig(reward="length", weight=0),
    ]
    scores = tuple((Score(value), Score(3.0 - value)) for value in (2.0, 1.0))
    both = replace(group(0, ["a", "b"], [0, 0]), scores_GR=scores)
    figures = pair_figures([both], config(pairs=True, rewards=two))
    assert (
        figures["accuracy"],
        figures["accuracy/exact_answer"],
        figures["accuracy/length"],
    ) == (
        0.0,
        1.0,
        0.0,
    )
    assert pair_figures([], config(pairs=True)) == {"equal": 0.0, "masked": 0.0}


def test_several_who_score_are_compared_on_the_pairs_that_both_score() -> None:
    """The second is right on every pair; the first is wrong on one in four, whichever they are, and skips one."""
    two = [RewardConfig(reward="exact_answer"), RewardConfig(reward="length")]
    better: list[float | None] = [None, *([0.0, 2.0, 2.0, 2.0] * 10)]
    groups = [
        replace(
            group(n, ["a", "b"], [0, 0]),
            scores_GR=((Score(mine), Score(2.0)), (Score(1.0), Score(1.0))),
        )
        for n, mine in enumerate(better)
    ]
    figures = pair_figures(groups, config(pairs=True, rewards=two))
    assert (figures["accuracy/exact_answer"], figures["accuracy/length"]) == (0.75, 1.0)


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    import numpy as np

    rng, covered = np.random.default_rng(1), 0
    for _ in range(100):
        right = rng.random(60) < 0.4
        groups = [group(n, ["7"], [float(is_right)]) for n, is_right in enumerate(right)]
        figures = evaluation_figures(
            count_groups(groups, config(num_samples=1)), config(num_samples=1)
        )
        covered += figures["pass@1/low"] <= 0.4 <= figures["pass@1/high"]
    assert 88 <= covered <= 100


def test_answers_that_are_equal_vote_together() -> None:
    assert (
        final_answer("so 3 + 4 = 7.")
        == final_answer("<think>8</think>7.0")
        == final_answer(r"\boxed{7}")
    )
    assert final_answer(r"\boxed{\frac{1}{2}}") == final_answer("0.5") == final_answer("½")
    assert final_answer(r"\boxed{x^2}") == r"x^2"
    assert final_answer("It is:\nParis.") == final_answer("PARIS") != final_answer("Rome")
    assert final_answer("") == "" == final_answer(r"\boxed{")


def test_a_reward_that_compares_no_answers_has_no_majority() -> None:
    figures = evaluation_figures(
        count_groups(GROUPS, settings := config(rewards=[RewardConfig(reward="length")])),
        settings,
    )
    assert not any(name.startswith("majority") for name in figures)


def rows(*values: float, every: int = 2) -> list[dict[str, Any]]:
    return [
        {"step": every * index, "ycore/eval/reward": value}
        for index, value in enumerate(values)
    ]


def test_no_gain_ends_a_run_after_so_many_evaluations() -> None:
    run = config(eval_dataset="t", stop_when=["no-gain:2"])
    assert why_stop(rows(0.1, 0.5, 0.4), run) is None
    reason = why_stop(rows(0.1, 0.5, 0.4, 0.5), run)
    assert reason == "no gain in 2 evaluations over reward 0.5 of step 2"
    assert best_of(rows(0.1, 0.5, 0.4, 0.5), "ycore/eval/reward") == {
        "step": 2,
        "ycore/eval/reward": 0.5,
    }


def test_nothing_to_learn_ends_a_run_after_so_many_steps() -> None:
    run, steps = config(stop_when=["nothing-to-learn:3"]), [0.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    metrics = [{"step": n, "ycore/skipped": value} for n, value in enumerate(steps)]
    assert (
        why_stop(metrics, run) is None
        and why_stop([*metrics, {"step": 6, "ycore/eval/reward": 1.0}], run) is None
    )
    assert "3 steps in a row" in str(
        why_stop([*metrics, {"step": 6, "ycore/skipped": 1.0}], run)
    )


def test_seconds_end_a_run_before_the_step_that_would_pass_them() -> None:
    run = config(stop_when=["seconds:30"])
    metrics = [
        {"step": n, "ycore/time/step": value} for n, value in enumerate([6.0, 10.0, 8.0], 1)
    ]
    assert (
        why_stop([], run) is None
        and why_stop([*metrics[:2], {"step": 2, "ycore/eval/reward": 1.0}], run) is None
    )
    assert (
        why_stop(metrics, run) == "3 steps took 24 s of 30, and one more is likely to pass them"
    )


def test_an_evaluation_is_due_before_the_first_step_and_after_the_last() -> None:
    assert [step for step in range(11) if is_due(step, 4, 10)] == [0, 4, 8, 10]
    assert [step for step in range(12) if is_due(step, None, 11)] == [0, 3, 6, 9, 11]


def tuning(method: str = "sft", **settings: Any) -> TuneConfig:
    return TuneConfig.model_validate(
        {"algorithm": method, "model": "m", "dataset": "d", "output": "o", **settings}
    )


def test_a_loss_is_best_where_it_is_lowest() -> None:
    metrics = [
        {"step": n, "ycore/eval/loss": loss, "ycore/eval/accuracy": 0.5}
        for n, loss in enumerate([2.0, 1.0, 1.5])
    ]
    assert why_stop(metrics[:2], tuning(stop_when=["no-gain:1"])) is None
    reason = why_stop(metrics, tuning(stop_when=["no-gain:1"]))
    assert reason == "no gain in 1 evaluations over loss 1 of step 1"
    assert first_and_last(metrics)["held_out"]["after"]["loss"] == 1.5
    best = best_of(metrics, watched_metric(tuning("reward", keep_best="loss")))
    assert best is not None and best["step"] == 1
    by_accuracy = tuning("reward", keep_best="accuracy", stop_when=["no-gain:2"])
    assert "over accuracy 0.5 of step 0" in str(why_stop(metrics, by_accuracy))


@pytest.mark.parametrize(
    ("method", "settings", "num_held_out", "said"),
    [
        ("sft", {"eval_every": 5}, 0, "--eval-every needs rows to measure on; hold some out"),
        ("sft", {"stop_when": ["no-gain:2"]}, 0, "--stop-when no-gain needs rows"),
        (
            "dpo",
            {"keep_best": "accuracy"},
            9,
            "(loss, rewards/accuracies, rewards/margins); it is 'accuracy'",
        ),
        ("reward", {"keep_best": "acuracy"}, 9, "did you mean 'accuracy'?"),
        (
            "kto",
            {"stop_when": ["no-gain:2", "nothing-to-learn:2"]},
            9,
            "ycore kto has none; take no-gain:N",
        ),
        ("kto", {"stop_when": ["no-gain:2", "bored:2"]}, 9, "it is 'bored:2'"),
    ],
)
def test_what_an_evaluation_of_examples_cannot_have_is_refused_by_name(
    method: str, settings: dict[str, Any], num_held_out: int, said: str
) -> None:
    check_measuring(tuning(stop_when=["seconds:60"]), 0)
    check_measuring(
        tuning(eval_every=5, keep_best="mean_token_accuracy", stop_when=["no-gain:2"]), 9
    )
    with pytest.raises(ConfigError) as caught:
        check_measuring(tuning(method, **settings), num_held_out)
    assert said in str(caught.value)


def test_the_report_has_both_ends() -> None:
    ends = first_and_last(rows(0.1, 0.5, 0.4))["held_out"]
    assert (ends["before"]["reward"], ends["after"]["step"]) == (0.1, 4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"keep_best": "pass@1"}, "--keep-best needs rows to measure on"),
        ({"eval_dataset": "t", "keep_best": "accuracy"}, "it is 'accuracy'"),
        (
            {"eval_dataset": "t", "keep_best": "pass@3"},
            "pass@1, pass@2, pass@4, majority@4); it is 'pass@3'",
        ),
        ({"stop_when": ["no-gain:2"]}, "--stop-when no-gain needs rows"),
        ({"eval_dataset": "t", "stop_when": ["no-gain"]}, "it is 'no-gain'"),
        ({"eval_dataset": "t", "stop_when": ["no-gain:0"]}, "N from 1"),
        ({"stop_when": ["bored:3"]}, "takes no-gain:N"),
        (
            {"eval_dataset": "t", "eval_rewards": [{"reward": "judge:x"}]},
            "give it as a reward too, with weight 0",
        ),
        ({"eval_dataset": "t", "replay": "runs/a"}, "starts none"),
        (
            {"stop_when": ["nothing-to-learn:3"], "trl": {"beta": 0.1}},
            "without a gradient, and with beta 0.1 each has one; take no-gain:N or seconds:N",
        ),
        (
            {"stop_when": ["nothing-to-learn:3"], "algorithm": "ppo"},
            "without a gradient, and with ycore ppo each has one",
        ),
    ],
)
def test_what_an_evaluation_cannot_have_is_refused_by_name(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_evaluation(config(**settings))
    assert said in str(caught.value)


def test_no_more_is_drawn_than_is_left_to_learn() -> None:
    """If 2 % of 80 prompts can teach, two groups are all there is; of 8000 there are plenty."""
    yields = AcceptanceRate(kept=0.5, finished=25.0)
    assert yields.rate == LEAST and (yields.left(80), yields.left(8000)) == (2, 160)
    drawn = [
        num_to_draw(
            need=8,
            kept=0,
            in_flight=0,
            drawn=0,
            rate=yields.rate,
            max_draws=max(8, min(8, left) * 4),
        )
        for left in (yields.left(80), yields.left(8000))
    ]
    assert drawn == [8, 32]
