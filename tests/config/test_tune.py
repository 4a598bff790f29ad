"""TuneConfig: where its values come from, what is refused, and the sizes that follow."""

from pathlib import Path
from typing import Any

import pytest
from trl import DPOConfig, KTOConfig, RewardConfig, SFTConfig

from ycore.config.algorithms import kind_of, tune_kind
from ycore.config.batch import TuneBatch, derive_tune_batch
from ycore.config.resolve import resolve_as
from ycore.config.schema import METHODS, TRL_CLASS, TUNE_ALIASES, TuneConfig, tune_refusal
from ycore.config.trl_arguments import TUNE_ARGUMENTS_LEARNING_RATE_FULL as LEARNING_RATE_FULL
from ycore.config.trl_arguments import TUNE_ARGUMENTS_LEARNING_RATE_LORA as LEARNING_RATE_LORA
from ycore.config.trl_arguments import tune_arguments
from ycore.config.trl_fields import coerce, fields_of
from ycore.errors import ConfigError
from ycore.run.paths import RunFolder

CLASSES: dict[str, Any] = {"sft": SFTConfig, "reward": RewardConfig, "dpo": DPOConfig, "kto": KTOConfig}


def resolved(method: str = "sft", **keys: Any) -> TuneConfig:
    options = {"algorithm": method, "model": "m", "dataset": "d", "output": "o", **keys}
    return resolve_as(tune_kind(method), options=options)


def sizes(config: TuneConfig, *, num_rows: int = 100, world_size: int = 1, on_cpu: bool = True) -> TuneBatch:
    return derive_tune_batch(config, num_rows=num_rows, world_size=world_size, on_cpu=on_cpu)


@pytest.mark.parametrize("method", METHODS)
def test_trls_class_takes_what_ycore_says(method: str, tmp_path: Path) -> None:
    config = resolved(method)
    arguments = tune_arguments(config, sizes(config), RunFolder(tmp_path))
    built = CLASSES[method](**arguments)
    assert {name: vars(built)[name] for name in arguments} == {**arguments, "report_to": []}
    assert built.learning_rate == LEARNING_RATE_LORA[method]
    full = resolved(method, lora=None)
    assert tune_arguments(full, sizes(full), RunFolder(tmp_path))["learning_rate"] == LEARNING_RATE_FULL[method]


@pytest.mark.parametrize("method", METHODS)
def test_trls_names_for_our_keys_are_fields_of_its_class(method: str) -> None:
    fields = fields_of(TRL_CLASS[method])
    assert TUNE_ALIASES.keys() <= fields.keys()
    assert set(TUNE_ALIASES.values()) <= TuneConfig.model_fields.keys()


def test_trls_spelling_is_understood_and_contradictions_are_not() -> None:
    config = resolved(trl={"max_steps": "7", "num_train_epochs": "2", "bf16": "false", "save_steps": 3})
    assert (config.steps, config.epochs, config.dtype, config.checkpoint_every) == (7, 2.0, "float32", 3)
    assert resolved(trl={"max_steps": "-1"}).steps is None
    with pytest.raises(ConfigError, match="max_steps is TRL's name of steps, and they differ"):
        resolved(steps=3, trl={"max_steps": 4})


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("sft", {"trl": {"eval_steps": 3}}, r"eval_steps is not taken from TRL's fields: .*--held-out 200"),
    ("sft", {"trl": {"beta": 0.1}}, "TRL has no field beta"),
    ("dpo", {"trl": {"loss_type": "ippo"}}, r"loss_type is one of sigmoid, .*did you mean 'ipo'"),
    ("sft", {"trl": {"loss_type": "dapo"}}, "loss_type is one of nll, dft, chunked_nll"),
    ("kto", {"trl": {"max_length": 0}}, "max_length must be at least 1"),
    ("sft", {"group_size": 8}, "no key group_size"),
    ("sft", {"batch": 8}, "no key batch; did you mean"),
    ("sft", {"steps": 0}, "steps must be greater than 0"),
    ("sft", {"epochs": -1}, "epochs must be greater than 0"),
    ("sft", {"model": None}, "model must be text"),
]


@pytest.mark.parametrize(("method", "keys", "message"), REFUSED)
def test_what_is_wrong_is_named(method: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(method, **keys)


def test_loss_types_are_those_of_the_method() -> None:
    assert coerce(fields_of("DPOConfig")["loss_type"], "ipo,sft") == ["ipo", "sft"]
    assert coerce(fields_of("KTOConfig")["loss_type"], "apo_zero_unpaired") == "apo_zero_unpaired"
    assert "cispo" in fields_of("GRPOConfig")["loss_type"].choices


def test_a_missing_dataset_is_asked_for_in_the_methods_words() -> None:
    with pytest.raises(ConfigError, match=r"no model and no dataset given; say e.g. .* --dataset pairs.jsonl"):
        resolve_as(tune_kind("dpo"), options={"algorithm": "dpo"})


def test_refusals_name_real_fields() -> None:
    known = {name for method in METHODS for name in fields_of(TRL_CLASS[method])}
    assert {name for name in known if tune_refusal(name)} >= {"eval_steps", "fp16", "dataset_text_field"}
    assert kind_of("rloo").config is kind_of("grpo").config is not kind_of("kto").config


def test_a_step_is_split_into_micro_batches_that_fit() -> None:
    batch = sizes(resolved("sft", batch_size=12, trl={"max_length": 512}))
    assert (batch.per_device_train_batch_size, batch.gradient_accumulation_steps) == (4, 3)
    assert (batch.steps, batch.epochs) == (9, 1.08)
    pairs = sizes(resolved("reward", batch_size=12, trl={"max_length": 512}))
    assert pairs.per_device_train_batch_size == 2
    assert "12 rows a step on 1 rank: 6 micro-batches of 2" in str(pairs)
    on_gpu = sizes(resolved("reward", batch_size=12, trl={"max_length": 512}), on_cpu=False)
    assert on_gpu.per_device_train_batch_size == 12


def test_trls_batch_fields_mean_what_they_mean_there() -> None:
    batch = sizes(resolved(trl={"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}), world_size=2)
    assert (batch.batch_size, batch.steps) == (12, 9)
    assert sizes(resolved(trl={"per_device_train_batch_size": 3})).batch_size == 3


def test_few_rows_make_a_small_batch() -> None:
    assert sizes(resolved(), num_rows=5, world_size=2).batch_size == 4


def test_the_longest_sequence_is_the_contexts_where_that_is_shorter() -> None:
    def batch(**keys: Any) -> TuneBatch:
        return derive_tune_batch(resolved(**keys), num_rows=9, world_size=1, on_cpu=True, context_length=512)

    assert batch().max_length == 512
    assert batch(trl={"max_length": 64}).max_length == 64
    assert batch(trl={"max_length": None}).max_length is None
    with pytest.raises(ConfigError, match=r"context of 512 tokens; it is 900; e\.g\. --max-length 512"):
        batch(trl={"max_length": 900})


SIZES_REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("sft", {"batch_size": 9}, 2, r"multiple of the 2 ranks; it is 9; e.g. 8 or 10"),
    ("sft", {"batch_size": 200}, 1, r"a step takes 200 rows and the dataset has 100 .*--batch-size 100"),
    ("sft", {"batch_size": 8, "trl": {"per_device_train_batch_size": 3}}, 1, r"3 \* 2; leave one .*--batch-size 6"),
    ("kto", {"trl": {"per_device_train_batch_size": 1}}, 1, "kto needs 2 rows or more in a micro-batch"),
]


@pytest.mark.parametrize(("method", "keys", "world_size", "message"), SIZES_REFUSED)
def test_impossible_sizes_name_what_works(method: str, keys: dict[str, Any], world_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sizes(resolved(method, **keys), world_size=world_size)


def test_ktos_micro_batch_is_never_one() -> None:
    assert sizes(resolved("kto")).per_device_train_batch_size >= 2
