"""Flow models on disk: folders as diffusers saves them, and `flow-digits`, which ycore makes itself.

FOLDER/transformer or FOLDER/unet   the network: config.json and its weights in safetensors
FOLDER/scheduler                    scheduler_config.json, of a FlowMatch scheduler
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL, STDOUT
from typing import Any

from ycore.errors import ConfigError, ModelError
from ycore.models.hub import build_once, cache_dir

DIGITS = "flow-digits"
DIGITS_CLASSES = 10
_DIGITS_VERSION = 1
_MAKE_WITHIN_S = 1800

INSTALL = "pip install 'ycore[pictures]'"
_PARTS = ("transformer", "unet")
_NETWORKS = {"DiTTransformer2DModel": "num_embeds_ada_norm", "UNet2DModel": "num_class_embeds"}
"""Networks that ask for a point, a time and a class; and what their number of classes is called."""


class FlowFolder:
    """A flow model's folder, of which nothing but its settings is read; ModelError where it is none."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise ModelError(
                f"--model {root} is no folder; give the folder of a flow model, or `flow-digits`"
            )
        parts = [part for part in _PARTS if (root / part / "config.json").is_file()]
        scheduler = root / "scheduler" / "scheduler_config.json"
        if not parts:
            raise ModelError(
                f"{root} is no flow model: it has no transformer/config.json and no unet/config.json; "
                "give a folder that diffusers saved, or `flow-digits`"
            )
        name = _read(scheduler).get("_class_name", "none") if scheduler.is_file() else "none"
        if "FlowMatch" not in name:
            raise ModelError(
                f"{root} is no flow model: its scheduler is {name}, not a FlowMatch one; a model that predicts noise "
                "cannot be trained as a velocity"
            )
        self.root = root
        self.part = parts[0]
        self.config = _read(root / self.part / "config.json")
        self.shift = float(_read(scheduler).get("shift") or 1.0)
        self.network = str(self.config.get("_class_name"))
        if self.network not in _NETWORKS:
            raise ModelError(
                f"{root} has a {self.network}, which asks for more than a class; ycore flow takes "
                f"{' and '.join(_NETWORKS)}"
            )
        classes = self.config.get(_NETWORKS[self.network])
        if not classes:
            raise ModelError(
                f"{root} draws without a condition; ycore flow trains models that are asked for a class"
            )
        self.num_classes = int(classes)
        size, channels = self.config["sample_size"], int(self.config["in_channels"])
        height, width = (size, size) if isinstance(size, int) else size
        self.shape = (channels, int(height), int(width))
        if channels not in (1, 3):
            raise ModelError(
                f"{root} draws {channels} channels, so a latent; ycore flow decodes none: 1 or 3 are taken"
            )

    @property
    def no_class(self) -> int | None:
        """The class that stands for none, which guidance compares with."""
        return self.num_classes if self.network == "DiTTransformer2DModel" else None

    def load(self) -> Any:
        """The network in float32; ConfigError where diffusers is not installed."""
        try:
            import diffusers
        except ImportError:
            raise ConfigError(
                f"ycore flow needs diffusers, which is not installed; {INSTALL}"
            ) from None
        return getattr(diffusers, self.network).from_pretrained(self.root / self.part)


def _read(file: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return value


def flow_model(name: str) -> Path:
    """The folder that a model's name means, made or not; ModelError for one that is none."""
    if name == DIGITS and not os.path.isdir(name):
        return cache_dir() / f"{DIGITS}-{_DIGITS_VERSION}"
    folder = Path(name).expanduser()
    FlowFolder(folder)
    return folder


def check_flow_needs(name: str) -> None:
    """ConfigError where a package that the model needs is not installed."""
    needed = ("diffusers", "sklearn", "PIL") if name == DIGITS else ("diffusers", "PIL")
    missing = [package for package in needed if find_spec(package) is None]
    if missing:
        raise ConfigError(f"ycore flow needs {missing[0]}, which is not installed; {INSTALL}")


def flow_model_source(name: str) -> tuple[str, Callable[..., Path]]:
    """A note on where a model is, and the function that returns its folder, `fetch(log=...)`."""
    folder = flow_model(name)
    note = "is made once, from scikit-learn's digits, in two minutes"
    if folder.is_dir():
        note = f"found in {folder}"
    return note, partial(fetch_flow_model, name)


def fetch_flow_model(name: str, *, log: Path) -> Path:
    """The model's folder, made first where it is `flow-digits` and not there yet; ModelError where that fails."""
    folder = flow_model(name)
    if name != DIGITS or folder.is_dir():
        return folder

    def make(partial: Path) -> None:
        command = [sys.executable, "-P", "-m", "ycore.flow.flow_digits", str(partial)]
        try:
            with log.open("ab") as output:
                done = subprocess.run(
                    command,
                    stdin=DEVNULL,
                    stdout=output,
                    stderr=STDOUT,
                    timeout=_MAKE_WITHIN_S,
                    check=False,
                )
        except subprocess.TimeoutExpired:
            why = f"took more than {_MAKE_WITHIN_S} s; try again, or give --model a folder; its output is in {log}"
            raise ModelError(f"making {DIGITS} {why}") from None
        if done.returncode:
            raise ModelError(
                f"making {DIGITS} ended with exit status {done.returncode}; its output is in {log}"
            )

    return build_once(folder, make)
