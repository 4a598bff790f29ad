"""The trainer's process imports what its run may call."""

import json
from pathlib import Path
from typing import Any

import pytest

from ycore.trainer.__main__ import unused_packages

BITS = "bitsandbytes"


@pytest.mark.parametrize(
    ("config", "settings", "is_used"),
    [
        ({"quantize": None, "trl": {"learning_rate": 1e-4}}, {}, False),
        ({}, {}, False),
        ({"quantize": "4bit", "trl": {}}, {}, True),
        ({"trl": {"optim": "paged_adamw_8bit"}}, {}, True),
        ({"trl": {"model_init_kwargs": {"quantization_config": {}}}}, {}, True),
        ({"algorithm": "distill", "rewards": [{"reward": "teacher:a/quantized"}]}, {}, True),
        ({"algorithm": "gold", "trl": {"teacher_model_name_or_path": "a/b"}}, {}, True),
        ({}, {"quantization_config": {"load_in_4bit": True}}, True),
    ],
)
def test_bitsandbytes_is_left_out_where_nothing_is_quantized(
    tmp_path: Path, config: dict[str, Any], settings: dict[str, Any], is_used: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert (BITS in unused_packages(config, tmp_path)) != is_used
    assert "sklearn" in unused_packages(config, tmp_path)


def test_a_model_without_settings_is_not_quantized(tmp_path: Path) -> None:
    assert BITS in unused_packages({}, tmp_path)
