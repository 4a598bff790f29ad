"""What a run's settings need from the machine: packages and files. Checked before anything is loaded.

Not here: models, datasets, rewards and engines, which their own rooms check.
"""

import os
from importlib.util import find_spec

from ycore.config.kinds import AnyConfig
from ycore.errors import ConfigError

_REPORTERS = {"wandb": "'ycore[wandb]'", "trackio": "'ycore[trackio]'", "tensorboard": "tensorboard"}


def check_needs(config: AnyConfig) -> None:
    """Refuses trackers that are not installed and configuration files that do not exist."""
    for name in _as_list(config.trl.get("report_to")):
        if name in _REPORTERS and find_spec(name) is None:
            raise ConfigError(f"--report-to {name}: {name} is not installed; pip install {_REPORTERS[name]}")
    for name in ("deepspeed", "fsdp_config", "accelerator_config"):
        file = config.trl.get(name)
        if isinstance(file, str) and not os.path.isfile(os.path.expanduser(file)):
            raise ConfigError(f"{name} is a JSON file or JSON text; there is no file {file!r}")
    if config.trl.get("deepspeed") is not None and find_spec("deepspeed") is None:
        raise ConfigError("--deepspeed: DeepSpeed is not installed; pip install 'ycore[deepspeed]'")


def _as_list(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [] if value is None else [str(value)]
