"""Where values come from: the order of layers, TRL's spellings, and refusals that say the way out."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from ycore.config.algorithms import ALGORITHMS, Algorithm
from ycore.config.learners import GroupConfig
from ycore.config.resolve import check_needs, merge, require_rollouts, resolve, resolve_any
from ycore.config.schema import RunConfig, TuneConfig
from ycore.config.trl_arguments import aliases, refusal
from ycore.config.trl_fields import fields_of
from ycore.errors import ConfigError

FROM_EXAMPLES = [row for row in ALGORITHMS.values() if row.learns_from == "examples"]

BASE = {"model": "m", "dataset": "d", "rewards": ["exact_answer"]}


def _resolve(**options: object) -> RunConfig:
    return resolve(recipe=BASE, options=options)


def test_the_later_layer_wins() -> None:
    recipe = {
        **BASE,
        "steps": 1,
        "seed": 1,
        "max_tokens": 1,
        "engine": {"count": 1, "kind": "vllm"},
    }
    config = resolve(
        recipe=recipe,
        sets=["seed=2", "max_tokens=2", "engine.count=2"],
        options={"max_tokens": 3},
    )
    assert (config.steps, config.seed, config.max_tokens) == (1, 2, 3)
    assert (config.engine.count, config.engine.kind) == (2, "vllm")


def test_mappings_merge_and_lists_are_replaced() -> None:
    assert merge({"a": {"b": 1, "c": [1]}, "d": 1}, {"a": {"c": [2]}}) == {
        "a": {"b": 1, "c": [2]},
        "d": 1,
    }


def test_an_indexed_set_changes_what_an_option_gave() -> None:
    options = {"rewards": ["exact_answer", "length"]}
    config = resolve(
        recipe=BASE, sets=["rewards.1.weight=0.5", "rewards.1.args.target=9"], options=options
    )
    assert [(reward.reward, reward.weight) for reward in config.rewards] == [
        ("exact_answer", 1.0),
        ("length", 0.5),
    ]
    assert config.rewards[1].args == {"target": 9}
    assert options == {"rewards": ["exact_answer", "length"]}


def test_lora_can_be_kept_changed_and_dropped() -> None:
    recipe = {**BASE, "lora": {"r": 4}}
    kept = resolve(recipe=recipe, options={"lora": {}}).lora
    assert kept is not None and kept.r == 4
    assert resolve(recipe=recipe, sets=["lora.r=8"], options={"lora": None}).lora is None
    again = resolve(recipe={**BASE, "lora": None}, sets=["lora.r=8"]).lora
    assert again is not None and again.r == 8


@pytest.mark.parametrize(
    ("name", "value", "key", "expected"),
    [
        ("num_generations", "4", "group_size", 4),
        ("max_completion_length", 32, "max_tokens", 32),
        ("max_steps", "9", "steps", 9),
        ("output_dir", "o", "output", "o"),
        ("save_steps", "5", "checkpoint_every", 5),
        ("seed", "3", "seed", 3),
        ("bf16", "false", "dtype", "float32"),
        ("bf16", True, "dtype", "bfloat16"),
        ("trust_remote_code", True, "trust_remote_code", True),
    ],
)
def test_trl_s_spelling_of_a_key_of_ycore(
    name: str, value: object, key: str, expected: object
) -> None:
    config = _resolve(trl={name: value})
    assert config.model_dump()[key] == expected
    assert config.trl == {}


def test_two_spellings_may_agree_and_a_later_layer_may_differ() -> None:
    assert _resolve(trl={"num_generations": "4"}, group_size=4).group_size == 4
    assert (
        resolve(
            recipe={**BASE, "group_size": 8}, options={"trl": {"num_generations": "4"}}
        ).group_size
        == 4
    )


def test_trl_fields_take_their_types() -> None:
    config = resolve(
        recipe={**BASE, "trl": {"beta": 0.1}},
        sets=["trl.learning_rate=1e-4"],
        options={"trl": {"beta": "0"}},
    )
    assert config.trl == {"beta": 0.0, "learning_rate": 1e-4}
    plain = resolve(recipe={**BASE, "beta": 0.1}, sets=["learning_rate=1e-4", "beta=0"])
    assert plain.trl == config.trl


@pytest.mark.parametrize(
    ("recipe", "run_name", "output"),
    [
        ({}, "quickstart", "runs/quickstart"),
        (
            {"dataset": "task:addition?digits=1", "model": "smollm2-135m"},
            None,
            "runs/addition-digits-1-smollm2-135m",
        ),
        ({"dataset": "data/train.jsonl", "model": "/m/Tiny/"}, None, "runs/train-tiny"),
        (
            {"dataset": "openai/gsm8k:main", "model": "Qwen/Qwen2.5", "algorithm": "eval"},
            None,
            "runs/eval-gsm8k-main-qwen2.5",
        ),
        ({"output": "here"}, "quickstart", "here"),
    ],
)
def test_the_output_has_a_default(
    recipe: dict[str, str], run_name: str | None, output: str
) -> None:
    assert resolve_any(recipe={**BASE, **recipe}, run_name=run_name).output == output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stesp": 3}, "no key stesp; did you mean 'steps'?"),
        ({"learning_rat": 3}, "no key learning_rat; did you mean 'learning_rate'?"),
        (
            {"max_steps": 4, "trl": {"max_steps": 5}, "steps": 5},
            "max_steps is TRL's name of steps, and they differ: 4 and 5; give one",
        ),
        ({"lr": 3}, "no key lr; as an option it is --learning-rate VALUE"),
        ({"kind": "vllm"}, "no key kind; did you mean 'engine.kind'?"),
        ({"engine": {"kidn": "x"}}, "no key engine.kidn; did you mean 'kind'?"),
        (
            {"lora": {"rank": 3}},
            "no key lora.rank; known here: r, alpha, dropout, target_modules",
        ),
        (
            {"rewards": [{"reward": "a", "wieght": 1}]},
            "no key rewards.0.wieght; did you mean 'weight'?",
        ),
        (
            {"rewards": [{"weight": 1}]},
            "rewards.0.reward is missing; write it, e.g. {reward: ...}",
        ),
        (
            {"few_shot": [{"role": "user"}]},
            "few_shot.0.content is missing; write it, e.g. {content: ...}",
        ),
        (
            {"rewards": []},
            "rewards must be a list of 1 or more; it is []; name one, e.g. --reward exact_answer",
        ),
        ({"engine": {"count": -1}}, "engine.count must be 'auto' or at least 0; it is -1"),
        (
            {"engine": {"kind": "vlm"}},
            "engine.kind must be 'auto', 'vllm' or 'transformers'; it is 'vlm'; did you mean 'vllm'?",
        ),
        (
            {"divergence": "forward_kl"},
            "divergence must be 'reverse-kl', 'forward-kl' or 'js'; it is 'forward_kl'; did you mean 'forward-kl'?",
        ),
        (
            {"advantage": "reinforce+"},
            "advantage must be 'group', 'dr-grpo', 'rloo', 'lite-ppo', 'reinforce++-baseline', 'remax', 'maxrl', 'raft', "
            "'crpg', 'reinforce++' or 'turn' or file.py:function; it is 'reinforce+'; did you mean 'reinforce++'?",
        ),
        (
            {"engine": {"gpu_memory_utilization": float("nan")}},
            "engine.gpu_memory_utilization must be 'auto' or a finite number; it is nan",
        ),
        ({"steps": True}, "steps must be a whole number; it is True"),
        ({"steps": 2.5}, "steps must be a whole number; it is 2.5"),
        ({"model": 3}, "model must be text; it is 3"),
        (
            {"trl": 3},
            "trl must be a mapping of TRL's fields; it is 3; e.g. trl: {learning_rate: 1.0e-5}",
        ),
        (
            {"trl": {"learning_rate": 1e-5}, "learning_rate": 1e-4},
            "learning_rate is also under trl, and they differ: 0.0001 and 1e-05; give one",
        ),
        (
            {"max_steps": 4, "trl": {"max_steps": 5}},
            "max_steps is TRL's name of steps, and they differ: 4 and 5; give one",
        ),
        (
            {"env": ["none=a.py:Game"]},
            "an environment of none=a.py:Game has the name none, which is to have no environment; take another",
        ),
        (
            {"trl": {"num_generations": 4}, "group_size": 8},
            "num_generations is TRL's name of group_size, and they differ: 4 and 8; give one",
        ),
        (
            {"trl": {"save_steps": 0.1}},
            "save_steps is a whole number of steps between checkpoints, at least 1; it is 0.1",
        ),
    ],
)
def test_a_refusal_is_one_exact_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _resolve(**options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "name",
    [
        "use_vllm",
        "vllm_mode",
        "vllm_server_port",
        "generation_batch_size",
        "fp16",
        "reward_weights",
        "num_train_epochs",
    ],
)
def test_what_ycore_keeps_for_itself_is_refused_with_a_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is not taken from TRL's fields: "):
        _resolve(trl={name: "1"})


def test_importance_sampling_is_trl_s() -> None:
    assert _resolve(trl={"vllm_importance_sampling_mode": "token_mask"}).trl == {
        "vllm_importance_sampling_mode": "token_mask"
    }


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("engine", "takes key.path=value"),
        ("engine.=1", "takes key.path=value"),
        ("steps=[1", "is not a YAML value"),
        ("rewards.5.weight=1", "no element '5'; the list has 1"),
        ("steps.0=1", "no element '0'"),
        ("rewards.0=length", "no element '0'"),
        ("trl.lerning_rate=1", "TRL has no field lerning_rate; did you mean 'learning_rate'"),
    ],
)
def test_a_set_that_cannot_work(item: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(recipe=BASE, sets=[item])


def test_everything_that_is_missing_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(options={"model": "m"})
    assert str(caught.value) == (
        "no dataset and no rewards given; say e.g. --dataset 'task:addition?digits=1' "
        "--reward exact_answer, or --recipe (`ycore recipes` lists them)"
    )


# -- runs on given examples ----------------------------------------------------------------------------------------


def resolved(method: str = "sft", **keys: Any) -> TuneConfig:
    return resolve(
        options={"algorithm": method, "model": "m", "dataset": "d", "output": "o", **keys}
    )


@pytest.mark.parametrize("algorithm", FROM_EXAMPLES, ids=lambda row: row.name)
def test_trls_names_for_our_keys_are_fields_of_its_class(algorithm: Algorithm) -> None:
    assert aliases(algorithm).keys() <= fields_of(algorithm.trl_config).keys()
    assert aliases(algorithm)["num_train_epochs"] == "epochs"
    assert set(aliases(algorithm).values()) <= TuneConfig.model_fields.keys()


def test_trls_spelling_is_understood_and_contradictions_are_not() -> None:
    config = resolved(
        trl={"max_steps": "7", "num_train_epochs": "2", "bf16": "false", "save_steps": 3}
    )
    assert (config.steps, config.epochs, config.dtype, config.checkpoint_every) == (
        7,
        2.0,
        "float32",
        3,
    )
    assert resolved(trl={"max_steps": "-1"}).steps is None
    with pytest.raises(ConfigError, match="max_steps is TRL's name of steps, and they differ"):
        resolved(steps=3, trl={"max_steps": 4})


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "sft",
        {"trl": {"eval_steps": 3}},
        r"eval_steps is not taken from TRL's fields: .*--held-out 200",
    ),
    ("sft", {"trl": {"beta": 0.1}}, "TRL has no field beta"),
    (
        "dpo",
        {"trl": {"loss_type": "ippo"}},
        r"loss_type must be 'sigmoid', .*did you mean 'ipo'",
    ),
    ("sft", {"trl": {"loss_type": "dapo"}}, "loss_type must be 'nll', 'dft' or 'chunked_nll'"),
    ("kto", {"trl": {"max_length": 0}}, "max_length must be at least 1"),
    (
        "sft",
        {"group_size": 8},
        "group_size is of ycore grpo and ycore ppo, and this is ycore sft",
    ),
    ("sft", {"batch": 8}, "no key batch; did you mean"),
    ("sft", {"steps": 0}, "steps must be greater than 0"),
    ("sft", {"epochs": -1}, "epochs must be greater than 0"),
    ("sft", {"model": None}, "model must be text"),
]


@pytest.mark.parametrize(("method", "keys", "message"), REFUSED)
def test_what_is_wrong_is_named(method: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(method, **keys)


def test_a_missing_dataset_is_asked_for_in_the_methods_words() -> None:
    with pytest.raises(
        ConfigError, match=r"no model and no dataset given; say e.g. .* --dataset pairs.jsonl"
    ):
        resolve(options={"algorithm": "dpo"})


def test_refusals_name_real_fields() -> None:
    refused = {
        name
        for row in FROM_EXAMPLES
        for name in fields_of(row.trl_config)
        if refusal(name, row)
    }
    assert refused >= {"eval_steps", "fp16", "dataset_text_field"}


def test_a_command_with_rollouts_takes_no_run_on_examples() -> None:
    assert require_rollouts(_resolve()) == _resolve()
    with pytest.raises(
        ConfigError,
        match="sft learns from given examples, without rollouts; take a run of `ycore grpo`",
    ):
        require_rollouts(resolved())


def test_rloo_is_a_preset_of_the_group_algorithms() -> None:
    config = _resolve(preset="rloo")
    assert isinstance(config, GroupConfig)
    assert (config.preset, config.advantage) == ("rloo", "rloo")
    assert resolve(recipe=config.model_dump()) == config, "a resumed run is the same run"


# -- what the settings need from this machine ----------------------------------------------------------------------


def _with_trl(**trl: object) -> RunConfig:
    return resolve(recipe=BASE, options={"trl": trl})


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="accelerator_config is a JSON file or JSON text; there is no file"
    ):
        check_needs(_with_trl(accelerator_config=str(tmp_path / "none.json")))
    (tmp_path / "some.json").write_text("{}")
    check_needs(_with_trl(accelerator_config=str(tmp_path / "some.json")))
    check_needs(_with_trl(accelerator_config='{"split_batches": false}'))


@pytest.mark.parametrize(
    "trl", [{"deepspeed": "zero3.json"}, {"fsdp": "full_shard"}, {"fsdp_config": {"a": 1}}]
)
def test_sharding_that_the_plan_does_not_know_is_refused(trl: dict[str, Any]) -> None:
    """It was planned as ddp; under ZeRO-3 a sync of adapters would hang."""
    with pytest.raises(ConfigError, match=rf"{next(iter(trl))} shards .*take --accelerate"):
        check_needs(_with_trl(**trl))


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_needs(_with_trl(report_to="none"))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "ycore.config.resolve.find_spec",
        lambda name: None if name == "wandb" else find_spec(name),
    )
    with pytest.raises(
        ConfigError, match=r"wandb is not installed; pip install 'ycore\[wandb\]'"
    ):
        check_needs(_with_trl(report_to="tensorboard,wandb"))


@pytest.mark.parametrize("name", ["swanlab", "mlflow", "comet_ml", "azure_ml", "flyte"])
def test_no_tracker_passes_that_is_not_installed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ycore.config.resolve.find_spec", lambda package: None)
    with pytest.raises(
        ConfigError, match=rf"--report-to {name}: \w+ is not installed; pip install \w+"
    ):
        check_needs(_with_trl(report_to=name))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"lora": None},
            "--quantize 4bit is for the frozen base of a LoRA run; leave --full out",
        ),
        (
            {"accelerate": "zero3"},
            "keeps the base whole on each rank, and zero3 shards it; take zero2",
        ),
    ],
)
def test_a_base_in_4_bits_is_refused_where_it_cannot_be(
    changes: dict[str, Any], message: str
) -> None:
    options = {
        "model": "m",
        "dataset": "task:addition",
        "output": "o",
        "rewards": ["exact_answer"],
        "quantize": "4bit",
    }
    check_needs(resolve(options=options))
    with pytest.raises(ConfigError) as refused:
        check_needs(resolve(options=options | changes))
    assert message in str(refused.value)


def test_an_environment_has_the_name_that_was_given_or_its_own() -> None:
    declared = [
        "walk=a.py:Walk",
        "a.py:Hunt",
        "textarena:Sudoku-v0?clues=20",
        "gym:chain_sum?x=a:b",
    ]
    environments = resolve(recipe=BASE | {"env": declared}).environments
    assert list(environments) == ["walk", "Hunt", "Sudoku-v0", "chain_sum"]
    assert list(environments.values()) == ["a.py:Walk", *declared[1:]]
    assert resolve(recipe=BASE | {"env": "a.py:Walk"}).env == ["a.py:Walk"], (
        "as in a run.json of an earlier version"
    )
    with pytest.raises(
        ConfigError,
        match=r"two environments of a\.py:Walk, b\.py:Walk have one name; give them names",
    ):
        resolve(recipe=BASE | {"env": ["a.py:Walk", "b.py:Walk"]})
    bare = {key: value for key, value in BASE.items() if key != "dataset"} | {
        "env": "a.py:Walk"
    }
    assert resolve(recipe=bare).dataset == ""


def test_null_takes_away_a_recipes_key_that_the_algorithm_does_not_have() -> None:
    recipe = {**BASE, "algorithm": "ppo", "critic": {"lr_ratio": 2.0}}
    options = {"algorithm": "grpo"}
    assert resolve(recipe=recipe, sets=["critic=null"], options=options).algorithm == "grpo"
    with pytest.raises(ConfigError, match=r"critic is of ycore ppo.*--set critic=null leaves"):
        resolve(recipe=recipe, options=options)


def test_several_datasets_are_a_mixture() -> None:
    config = _resolve(dataset=["data/a.jsonl:0.7", "gym:sums:.3"])
    assert [(part.name, part.share) for part in config.mixture] == [
        ("a.jsonl", 0.7),
        ("gym:sums", 0.3),
    ]
    assert config.dataset == "data/a.jsonl + gym:sums"
    assert [part.share for part in _resolve(dataset=["a", "b"]).mixture] == [1, 1]
    recipe = {**BASE, "dataset": [{"dataset": "a", "share": 2}, {"dataset": "b", "share": 1}]}
    again = resolve(
        recipe=resolve(recipe=recipe).model_dump(mode="json"), sets=["mixture.1.share=3"]
    )
    assert [part.share for part in require_rollouts(again).mixture] == [2, 3]
    for place in ("mixture", "dataset"):
        changed = require_rollouts(
            resolve(recipe=recipe, sets=[f"{place}.0.advantage=dr-grpo"])
        )
        assert changed.mixture[0].advantage == "dr-grpo"
    assert require_rollouts(resolve(recipe=recipe, options={"dataset": "c"})).mixture == []
    measured = require_rollouts(
        resolve(recipe=recipe, options={"eval_dataset": "c"})
    ).for_evaluation()
    assert measured is not None and measured.mixture == []


def test_a_dataset_of_several_has_held_out_rows_of_its_own() -> None:
    parts: list[dict[str, Any]] = [
        {"dataset": "a.jsonl", "eval_dataset": "rows/b.jsonl", "rewards": ["length"]},
        {"dataset": "c", "answer_column": "gold"},
        {"dataset": "d", "eval_dataset": "d"},
    ]
    more = {"rewards": ["exact_answer", "length"], "eval_limit": 7, "eval_split": "validation"}
    measured = _resolve(dataset=parts, **more).for_evaluation()
    assert measured is not None and measured.dataset == "rows/b.jsonl + d"
    assert [(part.name, part.split, part.limit) for part in measured.mixture] == [
        ("b.jsonl", "train", 7),
        ("d", "validation", 7),
    ]
    assert measured.unscored == {"b.jsonl": {0}, "d": set()}
    # What scores evaluations alone scores all of them.
    apart = _resolve(dataset=parts, eval_rewards=["exact_answer", "math"], **more)
    other = _resolve(dataset=parts, eval_rewards=["exact_answer"], **more)
    for config, unscored in ((apart, {0}), (other, set())):
        measured = config.for_evaluation()
        assert measured is not None and measured.unscored == {"b.jsonl": unscored, "d": set()}
    # The run's own held-out rows are one more.
    both = _resolve(dataset=parts, eval_dataset="e", **more).for_evaluation()
    assert both is not None and [part.name for part in both.mixture] == ["b.jsonl", "d", "e"]
    with pytest.raises(
        ConfigError, match=r"by their names, and they are b.jsonl, d, d; rename"
    ):
        _resolve(dataset=parts, eval_dataset="of/d", **more)


def test_a_dataset_names_one_of_the_runs_environments() -> None:
    parts = [{"dataset": "a", "environment": "Gane"}, {"dataset": "b", "environment": "none"}]
    settings: dict[str, Any] = {"dataset": parts, "env": ["a.py:Game", "a.py:Two"]}
    with pytest.raises(ConfigError, match=r"a names the environment 'Gane'.*'Game'"):
        _resolve(**settings)
    parts[0] |= {"environment": "Game", "eval_dataset": "held-out/a"}
    parts[1]["eval_dataset"] = "of-b"
    parts += [{"dataset": "c"}]
    config = require_rollouts(_resolve(**settings))
    row = {"environment": "Two"}
    assert [config.environment_of(name, row) for name in "abc"] == ["Game", "none", "Two"]
    assert config.environment_of("of-b", row) == "none", "also of its held-out rows"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (["a:0.5", "b"], "all have a share or none, and b has none; say e.g. b:0.5"),
        (
            ["x/a.csv", "y/a.csv"],
            "told apart by their names, and they are a.csv, a.csv; rename one",
        ),
        (["a:0", "b:1"], "mixture.0.share must be greater than 0; it is 0.0"),
        ([{"dataset": "a", "rewards": ["exact_anser"]}], "did you mean 'exact_answer'?"),
        ([{"dataset": "a", "rewards": []}], "mixture.0.rewards must be"),
        (
            [{"dataset": "a", "environment": "Gam"}],
            "a names the environment 'Gam', which the run has not; take none",
        ),
        ([{"dataset": "a", "weight": 1}], "no key mixture.0.weight"),
    ],
)
def test_a_mixture_that_cannot_be_is_one_line(parts: list[object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _resolve(dataset=parts)
    assert message in str(caught.value)


def test_only_a_measurement_takes_the_likeliest_tokens() -> None:
    greedy = {**BASE, "trl": {"temperature": 0}}
    for algorithm in ("grpo", "distill"):
        with pytest.raises(
            ConfigError, match=r"temperature must be greater than 0.*leave it out"
        ):
            resolve(recipe={**greedy, "algorithm": algorithm})
    config = resolve(recipe={**greedy, "algorithm": "eval", "num_samples": 1})
    assert config.trl["temperature"] == 0
