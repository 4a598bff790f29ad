"""Keys and combinations of keys that an algorithm refuses, each in one line with the way out."""

from typing import Any

import pytest

from ycore.config.learners import CriticSettings, PPOConfig
from ycore.config.resolve import resolve
from ycore.config.schema import RunConfig
from ycore.errors import ConfigError

BASE = {"model": "m", "dataset": "d", "rewards": ["exact_answer"]}


DISTILL = {"algorithm": "distill", "teacher": "t"}


def config(**options: Any) -> RunConfig:
    return resolve(recipe=BASE, options=options)  # type: ignore[return-value]


def test_ppo_has_a_critic_and_the_kl_in_the_reward() -> None:
    resolved = config(algorithm="ppo", group_size=1)
    assert isinstance(resolved, PPOConfig)
    assert (resolved.critic, resolved.kl_in, resolved.trl) == (
        CriticSettings(),
        "reward",
        {"loss_type": "dapo", "scale_rewards": "none"},
    )
    assert resolve(recipe=resolved.model_dump(mode="json")) == resolved, (
        "a resumed run is the same run"
    )
    over = config(
        algorithm="ppo", preset="vapo", critic={"alpha": 0.4}, trl={"loss_type": "grpo"}
    )
    assert isinstance(over, PPOConfig)
    assert (over.critic.alpha, over.critic.warmup_steps) == (0.4, 50)
    assert over.trl["loss_type"] == "grpo" and over.trl["epsilon_high"] == 0.28


def test_a_teacher_is_the_first_of_the_rewards() -> None:
    resolved = config(**DISTILL)
    assert [reward.reward for reward in resolved.rewards] == ["teacher:t", "exact_answer"]
    assert resolved.teaches_alone
    assert resolve(recipe=resolved.model_dump(mode="json")) == resolved, (
        "a resumed run is the same run"
    )
    weighted = {
        **resolved.model_dump(mode="json"),
        "rewards": [{"reward": "teacher:t", "weight": 0.5}, "length"],
    }
    again = resolve(recipe=weighted, options={"teacher": "t"})
    other = resolve(recipe=weighted, options={"teacher": "u"})
    assert isinstance(again, RunConfig) and isinstance(other, RunConfig)
    assert [(reward.reward, reward.weight) for reward in again.rewards] == [
        ("teacher:t", 0.5),
        ("length", 1),
    ]
    assert [(reward.reward, reward.weight) for reward in other.rewards] == [
        ("teacher:u", 1),
        ("length", 1),
    ]
    alone = resolve(options={"model": "m", "dataset": "d", "group_size": 1, **DISTILL})
    assert isinstance(alone, RunConfig) and [reward.reward for reward in alone.rewards] == [
        "teacher:t"
    ]


def test_where_every_scored_completion_teaches() -> None:
    assert config(algorithm="ppo").teaches_alone
    assert config(advantage="remax", group_size=1).teaches_alone
    assert not config().teaches_alone
    assert not config(advantage="reinforce++").teaches_alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"group_size": 1},
            "group_size must be 2 or more with advantage group, which compares a completion",
        ),
        (
            {"group_size": 1, "advantage": "rloo"},
            "group_size must be 2 or more with advantage rloo",
        ),
        (
            {"critic": {}},
            "critic is of ycore ppo, and this is ycore grpo; leave it out, or take ycore ppo",
        ),
        ({"algorithm": "ppo", "critic": None}, "critic must be a mapping; it is None"),
        (
            {"algorithm": "ppo", "advantage": "rloo"},
            "advantage is of ycore grpo and ycore distill, and this is ycore ppo; leave it out",
        ),
        (
            {"algorithm": "ppo", "preset": "gmpo"},
            "the preset gmpo sets loss_from, which ycore ppo",
        ),
        (
            {"algorithm": "ppo", "trl": {"loss_type": "vespo"}},
            "the loss vespo takes one advantage a completion",
        ),
        (
            {"algorithm": "ppo", "trl": {"importance_sampling_level": "sequence"}},
            "an advantage for each token",
        ),
        (
            {"algorithm": "ppo", "trl": {"off_policy_mask_threshold": 0.5}},
            "an advantage for each token",
        ),
        (
            {"algorithm": "ppo", "quantize": "4bit"},
            "which is not tried in 4 bits; leave --quantize out",
        ),
        (
            {"algorithm": "ppo", "critic": {"range": [1, 0]}},
            "the lowest and the highest value; it is 1, 0",
        ),
        (
            {"algorithm": "ppo", "critic": {"range": [0, 1], "init": "runs/rm"}},
            "give one of the two",
        ),
        ({"algorithm": "ppo", "critic": {"lamda": 1}}, "no key critic.lamda; did you mean"),
        ({"algorithm": "distill"}, "ycore distill needs a teacher; say --teacher MODEL"),
        (
            {"distill": {"divergence": "js"}},
            "distill is of ycore distill, and this is ycore grpo; leave it out",
        ),
        (
            {**DISTILL, "distill": {"divergence": "top-k"}},
            "distill.divergence must be 'sampled' or 'reverse-kl', 'forward-kl' or 'js'; it is 'top-k'",
        ),
        (
            {**DISTILL, "distill": {"beta": 0.3}},
            "distill.beta is of the divergence js, and it is sampled; leave",
        ),
        (
            {**DISTILL, "distill": {"divergence": "js"}, "accelerate": "zero3"},
            "which zero3 shards; take --accelerate zero2 or ddp",
        ),
        (
            {**DISTILL, "distill": {"divergence": "js"}, "loss_average": "prompts"},
            "leave loss_average=prompts out",
        ),
        (
            {"teacher": "t"},
            "a teacher is of ycore distill, and this is grpo; take ycore distill",
        ),
        (
            {**DISTILL, "critic": {}},
            "critic is of ycore ppo, and this is ycore distill; leave it out",
        ),
        (
            {**DISTILL, "advantage": "reinforce++"},
            "compares rewards within groups, which --advantage reinforce++",
        ),
        (
            {**DISTILL, "group_size": 1},
            "group_size must be 2 or more with exact_answer, which is compared",
        ),
        (
            {**DISTILL, "trl": {"temperature": 0.7}},
            "those at temperature 1, and temperature is 0.7; leave temperature",
        ),
        ({**DISTILL, "trl": {"top_k": 20}}, "and top_k is 20; leave top_k out"),
        (
            {**DISTILL, "trl": {"scale_rewards": "group"}},
            "leave scale_rewards out, and say --advantage",
        ),
        (
            {**DISTILL, "trl": {"loss_type": "vespo"}},
            "takes one advantage a completion, and ycore distill has one a",
        ),
        (
            {**DISTILL, "kl_in": "reward", "trl": {"beta": 0.1}},
            "kl_in is of ycore grpo and ycore ppo, and this is ycore distill",
        ),
        (
            {"loss_from": "ipo"},
            "loss_from must be 'grpo' or 'gmpo'; it is 'ipo'",
        ),
        (
            {"algorithm": "online-dpo", "loss_from": "grpo"},
            "loss_from must be 'dpo', 'ipo' or 'rrhf'; it is 'grpo'",
        ),
        (
            {"algorithm": "online-dpo", "advantage": "rloo"},
            "advantage is of ycore grpo and ycore distill, and this is ycore online-dpo",
        ),
        (
            {"algorithm": "online-dpo", "group_size": 1},
            "group_size must be 2 or more for ycore online-dpo",
        ),
        (
            {"algorithm": "online-dpo", "trl": {"beta": 0.0}},
            "the loss dpo needs beta above 0; say --beta 0.1",
        ),
        (
            {"algorithm": "online-dpo", "loss_from": "rrhf"},
            "the loss rrhf compares with no reference; say --beta 0",
        ),
        (
            {"algorithm": "online-dpo", "trust_region": "dppo-tv"},
            "and this is ycore online-dpo; leave it out",
        ),
        ({"kl_in": "reward", "trl": {"beta": 0.1}}, "kl_in=reward needs advantages by token"),
        (
            {"advantage": "reinforce++", "preset": "gspo"},
            "--advantage reinforce++ has an advantage for each token",
        ),
        (
            {"advantage": "turn"},
            "--advantage turn learns from rewards of turns, which only an environment gives",
        ),
        (
            {"advantage": "turn", "env": "a.py:A", "loss_from": "gmpo"},
            "the loss gmpo takes one advantage a completion",
        ),
        (
            {"advantage": "reinforce++", "loss_from": "gmpo"},
            "the loss gmpo takes one advantage a completion",
        ),
        ({"pairs": True}, "pairs is of ycore eval, and this is ycore grpo; leave it out"),
        (
            {"pairs": True, "algorithm": "eval", "env": ["a.py:A"]},
            "leave --tools, --env and --agent out",
        ),
        (
            {"pairs": True, "algorithm": "eval", "rewards": [{"reward": "teacher:m"}]},
            "no policy that writes, and teacher:m is of one",
        ),
        (
            {"pairs": True, "algorithm": "eval", "rewards": [{"reward": "agrees:j"}]},
            "no policy that writes, and agrees:j is of one",
        ),
        (
            {"rewards": ["agrees:j"], "env": ["a.py:A"]},
            "agrees:j asks the judge's own question, in one turn; leave",
        ),
        ({"rewards": ["agrees:j"], "tools": ["a.py:A"]}, "leave out --tools, --env, --agent"),
        ({"rewards": ["agrees:j"], "agent": "a.py:A"}, "leave out --tools, --env, --agent"),
        ({"rewards": ["agrees:j"], "system_prompt": "Hi"}, "system_prompt and few_shot"),
        (
            {"rewards": ["agrees:j", "agrees:k"]},
            "asked as one judge, and the rewards are agrees:j and agrees:k; leave",
        ),
        (
            {"trust_region": "clip-completion", "advantage": "reinforce++"},
            "leave --trust-region clip-completion out",
        ),
        (
            {"loss_average": "prompts", "trl": {"loss_type": "grpo"}},
            "and this is grpo; take --loss-type dapo, or leave",
        ),
        (
            {"trust_region": "dppo-tv", "preset": "cispo"},
            "and this is cispo; leave it out",
        ),
        (
            {"trust_region": "icepop", "preset": "gspo"},
            "importance_sampling_level=sequence gives a completion's tokens one weight; leave",
        ),
        (
            {"algorithm": "ppo", "divergence": "js", "trl": {"beta": 0.1}},
            "kl_in=reward puts the reverse KL into the reward; leave --divergence out",
        ),
        (
            {"loss": "a.py:f", "divergence": "js", "trl": {"beta": 0.1}},
            "in whose place is --loss a.py:f, which gets ref_logprobs; leave",
        ),
        (
            {"preset": "gmpo", "sampling": {"max_staleness": 2}},
            "--max-staleness 2 trains on tokens of older versions, for which the loss gmpo",
        ),
        ({"preset": "gmpo", "sampling": {"oversample": 1.5}}, "--oversample 1.5 trains on"),
        ({"preset": "gmpo", "sampling": {"reuse": 0.25}}, "sampling.reuse 0.25 trains on"),
        (
            {"preset": "gmpo", "trl": {"entropy_coef": 0.1}},
            "entropy_coef is 0.1, and the loss gmpo does not read it; leave it out",
        ),
        (
            {"algorithm": "online-dpo", "trl": {"entropy_coef": 0.1}},
            "entropy_coef is 0.1, and the loss dpo does not read it; leave it out",
        ),
        (
            {
                "algorithm": "distill",
                "rewards": ["teacher:m"],
                "distill": {"divergence": "js"},
                "trl": {"entropy_coef": 0.1},
            },
            "entropy_coef is 0.1, and the loss of distill.divergence=js does not read it; leave",
        ),
        (
            {"trl": {"sync_ref_model": True, "beta": 0.1}},
            "with adapters that is the base, which stays; say --full, or leave sync_ref_model out",
        ),
        ({"lora": None, "trl": {"sync_ref_model": True}}, "without beta there is none; say"),
        (
            {"lora": None, "accelerate": "zero3", "trl": {"sync_ref_model": True, "beta": 0.1}},
            "zero3 cuts up what a checkpoint must hold whole; say --accelerate zero2",
        ),
        *(
            (
                {**keys, "trl": {"multi_objective_aggregation": "normalize_then_sum"}},
                "is of TRL's own advantages, and here ycore computes them; leave it out",
            )
            for keys in (
                {"advantage": "rloo"},
                {"algorithm": "ppo"},
                {"algorithm": "online-dpo"},
                {"algorithm": "distill", "rewards": ["teacher:m"]},
                {"rewards": ["exact_answer", {"reward": "format", "constraint": True}]},
                {"dataset": [{"dataset": "a.jsonl", "advantage": "rloo"}, "b.jsonl"]},
            )
        ),
        (
            {"sampling": {"curriculum": True}, "group_size": 1, "advantage": "remax"},
            "here every completion does; leave it",
        ),
        (
            {"sampling": {"oversample": 1.5}, "env": ["a.py:A"]},
            "tools, environments and agents answer within one; leave",
        ),
        (
            {"sampling": {"max_staleness": 2}, "advantage": "remax"},
            "remax compares with a greedy one of the same weights; leave it out",
        ),
        (
            {"sampling": {"max_staleness": 2, "oversample": 1.5}},
            "--max-staleness 2 keeps engines busy from round to round; leave --oversample out",
        ),
        (
            {"sampling": {"max_staleness": 1, "min_effective_share": 0.9}},
            "is 0.9, and it delays the rounds of a stream; give --max-staleness 2 or more",
        ),
        (
            {"sampling": {"oversample": 1.5}, "advantage": "remax"},
            "remax compares with a greedy one of the same weights",
        ),
        (
            {"sampling": {"oversample": 1.5}, "deterministic": True},
            "leave --deterministic or --oversample out",
        ),
        (
            {"engine": {"args": {"speculative_config": {}}}, "deterministic": True},
            "leave --deterministic or engine.args.speculative_config out",
        ),
        (
            {"engine": {"args": {"speculative_config": {}}}, "trl": {"min_p": 0.1}},
            "leave --min-p or engine.args.speculative_config out",
        ),
        (
            {"algorithm": "ppo", "sampling": {"curriculum": "rate"}},
            "--curriculum learns which groups teach",
        ),
        (
            {"advantage": "crpg"},
            "--advantage crpg is CGPO's, and there is no constraint; say --constraint NAME",
        ),
        (
            {"constraint": ["exact_answer"]},
            "exact_answer is a constraint, and there is no reward to raise beside it",
        ),
        (
            {
                "constraint": ["format"],
                "dataset": [{"dataset": "a"}, {"dataset": "b", "rewards": ["exact_answer"]}],
            },
            "the rewards of b are exact_answer; add format to them",
        ),
        (
            {"constraint": ["format"], "group_size": 1, "advantage": "reinforce++"},
            "and group_size is 1; say --group",
        ),
        (
            {"constraint": ["format"], "advantage": "remax"},
            "--advantage remax takes no constraints, and format is one",
        ),
        (
            {**DISTILL, "constraint": ["format"]},
            "ycore distill takes no constraints, and format is one",
        ),
        ({"constraint": ["format:2"]}, "rewards.1.limit must be less than 1; it is 2.0"),
        (
            {"constraint": [":0.1"]},
            "--constraint takes the name of a reward, or NAME:LIMIT; it is ':0.1'",
        ),
        (
            {
                "rewards": [
                    "exact_answer",
                    {"reward": "format", "constraint": True, "weight": 2.0},
                ]
            },
            "the constraint format is kept, not added up, and its weight is 2; leave weight out",
        ),
        (
            {
                "constraint": ["format"],
                "advantage": "crpg",
                "constraints": {"by": "lagrangian"},
            },
            "--advantage crpg gates the reward; leave constraints.by out",
        ),
        (
            {"advantage": "raft", "kl_in": "reward", "trl": {"beta": 0.1}},
            "kl_in=reward needs advantages by token, and advantage raft has one a completion",
        ),
        ({"trust_region": "dppo"}, "'icepop' or 'geometric'; it is 'dppo'"),
    ],
)
def test_bad_input_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**options)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_repetition_penalty_that_the_trainer_cannot_know(algorithm: str) -> None:
    with pytest.raises(
        ConfigError, match=r"repetition_penalty 1\.5 .*leave it out.*--no-vllm-importance"
    ):
        config(algorithm=algorithm, trl={"repetition_penalty": 1.5})
    known = {"repetition_penalty": 1.5, "vllm_importance_sampling_correction": False}
    (line,) = config(algorithm=algorithm, trl=known).sampling_warnings()
    assert "repetition_penalty 1.5" in line and "leave repetition_penalty out" in line
    assert config(trl={"repetition_penalty": 1.0}).sampling_warnings() == []


@pytest.mark.parametrize(
    ("trl", "named"),
    [
        ({"top_k": 3}, ["top_k 3"]),
        ({"top_p": 0.9, "min_p": 0.1}, ["top_p 0.9", "min_p 0.1"]),
        ({"generation_kwargs": {"top_k": 3}}, ["generation_kwargs {'top_k': 3} has no effect"]),
        ({"temperature": 0.7, "top_k": 0, "top_p": 1.0}, []),
    ],
)
def test_the_plan_says_where_engines_do_not_sample_what_the_trainer_scores(
    trl: dict[str, Any], named: list[str]
) -> None:
    lines = config(trl=trl).sampling_warnings()
    assert len(lines) == bool(named)
    assert all(name in lines[0] for name in named)
    if named and "generation_kwargs" not in trl:
        assert "sampling/importance_sampling_ratio/mean" in lines[0] and "out" in lines[0]
