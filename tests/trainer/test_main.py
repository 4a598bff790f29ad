"""The trainer's process imports what its run needs."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ycore.trainer.__main__ import hidden, unused_packages

BITS = "bitsandbytes"


@pytest.mark.parametrize(
    ("config", "settings", "is_used"),
    [
        ({"quantize": None, "trl": {"learning_rate": 1e-4}}, {}, False),
        ({}, {}, False),
        ({"quantize": "4bit", "trl": {}}, {}, True),
        ({"trl": {"optim": "paged_adamw_8bit"}}, {}, True),
        ({"trl": {"model_init_kwargs": {"quantization_config": {}}}}, {}, True),
        ({"teacher": "a/quantized-teacher"}, {}, True),
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


def test_hidden_packages_are_found_again_and_loaded_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_extra.py").write_text("VALUE = 1")
    monkeypatch.syspath_prepend(tmp_path)
    with hidden(["some_extra", "json"]):
        assert importlib.util.find_spec("some_extra") is None
        assert sys.modules["json"] is json
        with pytest.raises(ModuleNotFoundError):
            import some_extra
    import some_extra

    assert some_extra.VALUE == 1
    del sys.modules["some_extra"]


def test_what_failed_to_load_hides_nothing() -> None:
    with pytest.raises(RuntimeError), hidden(["some_other_extra"]):
        raise RuntimeError("the algorithm cannot be loaded")
    assert "some_other_extra" not in sys.modules
