"""The table of TRL's fields is the installed TRL's, and values are turned into their types or refused."""

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.config.trl_table import CHOICES, LIMITS, build_table, table_text, trl_class
from ycore.config.algorithms import ALGORITHMS, Algorithm
from ycore.config.trl_fields import TABLE, coerce, fields_of
from ycore.errors import ConfigError

FIELDS = fields_of("GRPOConfig")


def test_the_table_is_that_of_the_installed_trl() -> None:
    """Where this fails, TRL has changed: run `python -m tests.config.trl_table` and read the difference."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    assert TABLE.read_text() == table_text(build_table())
    assert json.loads(TABLE.read_text())["trl"] == importlib.metadata.version("trl")


@pytest.mark.parametrize(
    "row",
    {row.trl_config: row for row in ALGORITHMS.values()}.values(),
    ids=lambda row: row.name,
)
def test_names_and_defaults_are_those_of_the_installed_class(row: Algorithm) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    fields = fields_of(row.trl_config)
    installed = {field.name: field for field in dataclasses.fields(trl_class(row))}
    assert list(installed) == list(fields)
    for name, field in installed.items():
        if field.default is not dataclasses.MISSING:
            assert fields[name].default == field.default, name


def test_the_words_listed_here_are_in_trl_s_trainers_or_configs() -> None:
    trl, transformers = (
        Path(find_spec(name).origin).parent for name in ("trl", "transformers")
    )
    files = [
        *(trl / "trainer").glob("*.py"),
        *(trl / "experimental").rglob("*.py"),
        transformers / "training_args.py",
    ]
    source = "".join(file.read_text() for file in files)
    for choices in CHOICES.values():
        for word in (word for words in choices.values() for word in words):
            assert f'"{word}"' in source or f"'{word}'" in source, word


def test_reading_the_fields_imports_neither_trl_nor_torch() -> None:
    code = (
        "import sys; from ycore.config.trl_fields import fields_of; assert len(fields_of('GRPOConfig')) > 100; "
        "print([m for m in ('trl', 'transformers', 'torch', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240
    )
    assert done.stdout.strip() == "[]"


def test_every_class_has_its_own_fields() -> None:
    assert (
        "beta" not in fields_of("SFTConfig") and fields_of("DPOConfig")["beta"].default == 0.1
    )
    assert (
        "packing" not in fields_of("GRPOConfig") and fields_of("SFTConfig")["packing"].is_flag
    )


def test_loss_types_are_those_of_the_method() -> None:
    assert coerce(fields_of("DPOConfig")["loss_type"], "ipo,sft") == ["ipo", "sft"]
    assert coerce(fields_of("DPOConfig")["loss_type"], "ipo") == ["ipo"]
    assert (
        coerce(fields_of("KTOConfig")["loss_type"], "apo_zero_unpaired") == "apo_zero_unpaired"
    )
    assert "cispo" in fields_of("GRPOConfig")["loss_type"].choices


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("learning_rate", "1e-6", 1e-6),
        ("learning_rate", 0.5, 0.5),
        ("learning_rate", 1, 1.0),
        ("num_iterations", "2", 2),
        ("num_iterations", 2.0, 2),
        ("log_completions", "true", True),
        ("log_completions", "off", False),
        ("log_completions", True, True),
        ("tf32", "none", None),
        ("epsilon_high", "None", None),
        ("epsilon_high", None, None),
        ("run_name", "first", "first"),
        ("run_name", 7, "7"),
        ("reward_weights", "1,0.5", [1.0, 0.5]),
        ("reward_weights", [1, "0.5"], [1.0, 0.5]),
        ("generation_kwargs", '{"do_sample": true}', {"do_sample": True}),
        ("generation_kwargs", {"a": 1}, {"a": 1}),
        ("deepspeed", "zero2.json", "zero2.json"),
        ("lr_scheduler_type", "cosine", "cosine"),
        ("save_strategy", False, "no"),
        ("scale_rewards", True, "group"),
        ("scale_rewards", "false", "none"),
        ("report_to", "none", "none"),
        ("report_to", "wandb,tensorboard", ["wandb", "tensorboard"]),
        ("pad_to_multiple_of", "8", 8),
        ("pad_to_multiple_of", "auto", "auto"),
        ("optim_target_modules", "all-linear", "all-linear"),
    ],
)
def test_values_take_the_field_s_type(name: str, value: object, expected: object) -> None:
    converted = coerce(FIELDS[name], value)
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("learning_rate", "fast", "must be a number"),
        ("learning_rate", "nan", "finite number"),
        ("learning_rate", float("inf"), "finite number"),
        ("learning_rate", "-1", "at least 0"),
        ("learning_rate", True, "must be a number"),
        ("num_iterations", "2.5", "must be a whole number"),
        ("num_iterations", 0, "at least 1"),
        ("temperature", "-0.1", "at least 0"),
        ("repetition_penalty", "0", "greater than 0"),
        ("top_p", "1.5", "at most 1"),
        ("log_completions", "maybe", "must be true or false"),
        ("log_completions", 1, "must be true or false"),
        ("loss_type", "drgrpo", "did you mean 'dr_grpo'"),
        ("lr_scheduler_type", "cosin", "did you mean 'cosine'"),
        ("report_to", "wandbb", "did you mean 'wandb'"),
        ("report_to", "wandb,nothing", "it is 'nothing'"),
        ("generation_kwargs", "do_sample", "JSON"),
        ("generation_kwargs", "{broken", "JSON"),
        ("reward_weights", "a,b", "must be a number; it is 'b'"),
        ("parallelism_config", "x", "must be none"),
        ("epsilon", None, "must be a number"),
    ],
)
def test_values_of_the_wrong_type_are_refused_on_one_line(
    name: str, value: object, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        coerce(FIELDS[name], value)
    assert str(caught.value).startswith(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config_class", ["SDFTConfig", "SDPOConfig"])
def test_a_literal_of_trl_s_takes_its_words_alone(config_class: str) -> None:
    mode = fields_of(config_class)["distillation_mode"]
    assert coerce(mode, "full_logits") == "full_logits"
    with pytest.raises(ConfigError, match="full_logits") as caught:
        coerce(mode, "full_logit")
    assert str(caught.value).startswith("distillation_mode must be")


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("epsilon_high", "-3", "at least 0"),
        ("sapo_temperature_pos", 0, "greater than 0"),
        ("ref_model_sync_steps", "0", "at least 1"),
        ("num_completions_to_print", -1, "at least 1"),
        ("vllm_importance_sampling_clip_max", "-1", "greater than 0"),
        ("vllm_importance_sampling_clip_min", "-0.1", "at least 0"),
        ("entropy_target", "-0.1", "at least 0"),
        ("label_smoothing_factor", 1.5, "at most 1"),
        ("dataloader_prefetch_factor", "0", "at least 1"),
        ("dataloader_num_workers", "-1", "at least 0"),
        ("pad_to_multiple_of", "0", "at least 1 or 'auto'"),
        ("router_aux_loss_coef", "-1", "at least 0"),
        ("max_tool_calling_iterations", "-1", "at least 0"),
    ],
)
def test_numbers_out_of_their_range_are_refused(name: str, value: object, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        coerce(FIELDS[name], value)
    assert (
        str(caught.value)
        == f"{name} must be {rule}; it is {value!r}; TRL's default is {FIELDS[name].default!r}"
    )


def test_ranges_are_of_fields_that_exist() -> None:
    fields = {
        field.name: field
        for row in ALGORITHMS.values()
        for field in fields_of(row.trl_config).values()
    }
    assert LIMITS.keys() <= fields.keys()
    assert all({"int", "float"} & set(fields[name].kinds) for name in LIMITS)
