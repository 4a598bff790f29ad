"""Where values come from: the order of layers, TRL's spellings, and refusals that say the way out."""

import pytest

from ycore.config.resolve import merge, resolve
from ycore.config.schema import RunConfig
from ycore.errors import ConfigError

BASE = {"model": "m", "dataset": "d", "rewards": ["exact_answer"]}


def _resolve(**options: object) -> RunConfig:
    return resolve(recipe=BASE, options=options)


def test_the_later_layer_wins() -> None:
    recipe = {**BASE, "steps": 1, "seed": 1, "max_tokens": 1, "engine": {"count": 1, "kind": "vllm"}}
    config = resolve(recipe=recipe, sets=["seed=2", "max_tokens=2", "engine.count=2"], options={"max_tokens": 3})
    assert (config.steps, config.seed, config.max_tokens) == (1, 2, 3)
    assert (config.engine.count, config.engine.kind) == (2, "vllm")


def test_mappings_merge_and_lists_are_replaced() -> None:
    assert merge({"a": {"b": 1, "c": [1]}, "d": 1}, {"a": {"c": [2]}}) == {"a": {"b": 1, "c": [2]}, "d": 1}


def test_an_indexed_set_changes_what_an_option_gave() -> None:
    options = {"rewards": ["exact_answer", "length"]}
    config = resolve(recipe=BASE, sets=["rewards.1.weight=0.5", "rewards.1.args.target=9"], options=options)
    assert [(reward.reward, reward.weight) for reward in config.rewards] == [("exact_answer", 1.0), ("length", 0.5)]
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
def test_trl_s_spelling_of_a_key_of_ycore(name: str, value: object, key: str, expected: object) -> None:
    config = _resolve(trl={name: value})
    assert config.model_dump()[key] == expected
    assert config.trl == {}


def test_two_spellings_may_agree_and_a_later_layer_may_differ() -> None:
    assert _resolve(trl={"num_generations": "4"}, group_size=4).group_size == 4
    assert resolve(recipe={**BASE, "group_size": 8}, options={"trl": {"num_generations": "4"}}).group_size == 4


def test_trl_fields_take_their_types() -> None:
    config = resolve(
        recipe={**BASE, "trl": {"beta": 0.1}}, sets=["trl.learning_rate=1e-4"], options={"trl": {"beta": "0"}}
    )
    assert config.trl == {"beta": 0.0, "learning_rate": 1e-4}


@pytest.mark.parametrize(
    ("recipe", "run_name", "output"),
    [
        ({}, "quickstart", "runs/quickstart"),
        ({"dataset": "task:addition?digits=1", "model": "smollm2-135m"}, None, "runs/addition-digits-1-smollm2-135m"),
        ({"dataset": "data/train.jsonl", "model": "/m/Tiny/"}, None, "runs/train-tiny"),
        (
            {"dataset": "openai/gsm8k:main", "model": "Qwen/Qwen2.5", "algorithm": "eval"},
            None,
            "runs/eval-gsm8k-main-qwen2.5",
        ),
        ({"output": "here"}, "quickstart", "here"),
    ],
)
def test_the_output_has_a_default(recipe: dict[str, str], run_name: str | None, output: str) -> None:
    assert resolve(recipe={**BASE, **recipe}, run_name=run_name).output == output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stesp": 3}, "no key stesp; did you mean 'steps'?"),
        ({"learning_rate": 3}, "no key learning_rate; did you mean 'trl.learning_rate'?"),
        ({"kind": "vllm"}, "no key kind; did you mean 'engine.kind'?"),
        ({"engine": {"kidn": "x"}}, "no key engine.kidn; did you mean 'kind'?"),
        ({"lora": {"rank": 3}}, "no key lora.rank; known here: r, alpha, dropout, target_modules"),
        ({"rewards": [{"reward": "a", "wieght": 1}]}, "no key rewards.0.wieght; did you mean 'weight'?"),
        (
            {"rewards": [{"weight": 1}]},
            "rewards.0.reward is missing; a reward needs its name, e.g. {reward: exact_answer}",
        ),
        ({"rewards": []}, "rewards must be a list of 1 or more; it is []; name one, e.g. --reward exact_answer"),
        ({"engine": {"count": 0}}, "engine.count must be 'auto' or greater than 0; it is 0"),
        (
            {"engine": {"kind": "vlm"}},
            "engine.kind must be 'auto', 'vllm' or 'transformers'; it is 'vlm'; did you mean 'vllm'?",
        ),
        (
            {"engine": {"gpu_memory_utilization": float("nan")}},
            "engine.gpu_memory_utilization must be a finite number; it is nan",
        ),
        ({"steps": True}, "steps must be a whole number; it is True"),
        ({"steps": 2.5}, "steps must be a whole number; it is 2.5"),
        ({"model": 3}, "model must be text; it is 3"),
        ({"trl": 3}, "trl must be a mapping of TRL's fields; it is 3; e.g. trl: {learning_rate: 1.0e-5}"),
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
