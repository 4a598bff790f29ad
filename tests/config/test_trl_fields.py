"""The fields read from TRL's source are the installed TRL's, and values are turned into their types or refused."""

import dataclasses
import os
import subprocess
import sys

import pytest

from ycore.config.trl_fields import _CHOICES, COMPUTED, coerce, fields_of, package_folder
from ycore.errors import ConfigError

FIELDS = fields_of("GRPOConfig")


def test_names_and_defaults_are_those_of_the_installed_class() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from trl.trainer.grpo_config import GRPOConfig

    installed = {field.name: field for field in dataclasses.fields(GRPOConfig)}
    assert list(installed) == list(FIELDS)
    for name, field in installed.items():
        if FIELDS[name].default is not COMPUTED and field.default is not dataclasses.MISSING:
            assert FIELDS[name].default == field.default, name
    computed = [name for name, field in FIELDS.items() if field.default is COMPUTED]
    assert computed == ["optim"]


def test_the_words_listed_here_are_in_trl_s_trainer_or_config() -> None:
    folders = package_folder("trl") / "trainer", package_folder("transformers")
    files = folders[0] / "grpo_trainer.py", folders[0] / "grpo_config.py", folders[1] / "training_args.py"
    source = "".join(file.read_text() for file in files)
    for words in _CHOICES.values():
        for word in words:
            assert f'"{word}"' in source or f"'{word}'" in source, word


def test_reading_the_fields_imports_neither_trl_nor_torch() -> None:
    code = (
        "import sys; from ycore.config.trl_fields import fields_of; assert len(fields_of('GRPOConfig')) > 100; "
        "print([m for m in ('trl', 'transformers', 'torch', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_other_config_classes_are_read_too() -> None:
    assert "missing_class" not in fields_of("RLOOConfig")
    assert fields_of("RLOOConfig")["num_generations"].default == 2
    with pytest.raises(ConfigError, match="no config class NoSuchConfig"):
        fields_of("NoSuchConfig")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("learning_rate", "1e-6", 1e-6),
        ("learning_rate", 0.5, 0.5),
        ("learning_rate", 1, 1),
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
        ("learning_rate", "fast", "takes a number"),
        ("learning_rate", "nan", "finite number"),
        ("learning_rate", float("inf"), "finite number"),
        ("learning_rate", "-1", "at least 0"),
        ("learning_rate", True, "takes a number"),
        ("num_iterations", "2.5", "takes a whole number"),
        ("num_iterations", 0, "at least 1"),
        ("temperature", "0", "greater than 0"),
        ("top_p", "1.5", "at most 1"),
        ("log_completions", "maybe", "takes true or false"),
        ("log_completions", 1, "takes true or false"),
        ("loss_type", "drgrpo", "did you mean 'dr_grpo'"),
        ("lr_scheduler_type", "cosin", "did you mean 'cosine'"),
        ("report_to", "wandbb", "did you mean 'wandb'"),
        ("report_to", "wandb,nothing", "it is 'nothing'"),
        ("generation_kwargs", "do_sample", "JSON"),
        ("generation_kwargs", "{broken", "JSON"),
        ("reward_weights", "a,b", "comma list"),
        ("parallelism_config", "x", "takes none"),
        ("epsilon", None, "takes a number"),
    ],
)
def test_values_of_the_wrong_type_are_refused_on_one_line(name: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        coerce(FIELDS[name], value)
    assert str(caught.value).startswith(name)
    assert "\n" not in str(caught.value)
