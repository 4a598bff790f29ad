"""What a run's TRL fields need from the machine is looked for before anything is loaded."""

import importlib.util
from pathlib import Path

import pytest

from ycore.config.resolve import check_needs, resolve
from ycore.config.schema import RunConfig
from ycore.errors import ConfigError


def _config(**trl: object) -> RunConfig:
    return resolve(options={"model": "m", "dataset": "d", "rewards": ["exact_answer"], "trl": trl})


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fsdp_config is a JSON file or JSON text; there is no file"):
        check_needs(_config(fsdp_config=str(tmp_path / "none.json")))
    (tmp_path / "fsdp.json").write_text("{}")
    check_needs(_config(fsdp_config=str(tmp_path / "fsdp.json")))
    check_needs(_config(accelerator_config='{"split_batches": false}'))


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_needs(_config(report_to="none"))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("ycore.config.resolve.find_spec", lambda name: None if name == "wandb" else find_spec(name))
    with pytest.raises(ConfigError, match=r"wandb is not installed; pip install 'ycore\[wandb\]'"):
        check_needs(_config(report_to="tensorboard,wandb"))
