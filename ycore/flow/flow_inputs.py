"""The inputs of a flow run: a model's folder as diffusers saves it, and the conditions, the rows of a dataset.

FOLDER/transformer or FOLDER/unet   the network: config.json and its weights in safetensors
FOLDER/scheduler                    scheduler_config.json, of a FlowMatch scheduler
"""

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ycore.data.cells import Table, TableRow
from ycore.data.prompts import RESERVED_COLUMNS, PromptSet
from ycore.data.source import read_table
from ycore.errors import ConfigError, DataError, ModelError, nearest
from ycore.flow.flow_settings import IMAGES, FlowConfig
from ycore.models.names import read_settings
from ycore.types import Prompt

_INSTALL = "pip install 'ycore[pictures]'"
_PARTS = ("transformer", "unet")
_NETWORKS = {"DiTTransformer2DModel": "num_embeds_ada_norm", "UNet2DModel": "num_class_embeds"}
"""Networks that ask for a point, a time and a class; and what their number of classes is called."""


class FlowFolder:
    """A flow model's folder, of which nothing but its settings is read; ModelError where it is none."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise ModelError(
                f"--model {root} is no folder; give the folder of a flow model that diffusers saved"
            )
        parts = [part for part in _PARTS if (root / part / "config.json").is_file()]
        scheduler = root / "scheduler" / "scheduler_config.json"
        if not parts:
            raise ModelError(
                f"{root} is no flow model: it has no transformer/config.json and no unet/config.json; "
                "give a folder that diffusers saved"
            )
        schedule = read_settings(scheduler)
        name = str(schedule.get("_class_name", "none"))
        if "FlowMatch" not in name:
            raise ModelError(
                f"{root} is no flow model: its scheduler is {name:.100}, not a FlowMatch one; a model that predicts noise "
                "cannot be trained as a velocity"
            )
        self.root = root
        self.part = parts[0]
        config = read_settings(root / self.part / "config.json")
        self.network = str(config.get("_class_name"))
        if self.network not in _NETWORKS:
            raise ModelError(
                f"{root} has a {self.network:.100}, which asks for more than a class; ycore flow takes "
                f"{' and '.join(_NETWORKS)}"
            )
        classes = config.get(_NETWORKS[self.network])
        if not classes:
            raise ModelError(
                f"{root} draws without a condition; ycore flow trains models that are asked for a class"
            )
        try:
            self.shift = float(schedule.get("shift") or 1.0)
            self.num_classes = int(classes)
            size = config["sample_size"]
            channels = int(config["in_channels"])
            height, width = (size, size) if isinstance(size, int) else size
            self.shape = (channels, int(height), int(width))
        except (KeyError, TypeError, ValueError, OverflowError) as problem:
            raise ModelError(
                f"{root} has settings that are not as diffusers writes them ({problem!r:.100}); save it again"
            ) from None
        if channels not in (1, 3):
            raise ModelError(
                f"{root} draws {channels} channels, so a latent; ycore flow decodes none: 1 or 3 are taken"
            )

    def load(self) -> Any:
        """Return the network in float32."""
        import diffusers

        return getattr(diffusers, self.network).from_pretrained(self.root / self.part)


def flow_model(name: str) -> FlowFolder:
    """Return the model that `--model` names; ConfigError where a package that it needs is not installed."""
    for package in ("diffusers", "PIL"):
        if find_spec(package) is None:
            raise ConfigError(f"ycore flow needs {package}, which is not installed; {_INSTALL}")
    return FlowFolder(Path(name).expanduser())


# -- conditions --------------------------------------------------------------------------------------------------------

CLASSES = "classes"
"""The dataset of every class of the model, once."""


def load_conditions(config: FlowConfig, *, num_classes: int) -> PromptSet:
    """Return the prompts of `config.dataset`, or each class once; DataError with the first row that lacks the condition.

    A prompt's content is the row's text in `prompt`, where it has one, and its class else.
    """
    column = config.condition_column
    if config.dataset == CLASSES:
        table = Table(CLASSES, [{column: label} for label in range(num_classes)], (column,))
    else:
        table = read_table(
            config.dataset, split=config.split, seed=config.seed, limit=config.limit
        )
    if column not in table.columns:
        near = (
            nearest(column, table.columns)
            or "; name the one with the class by --set condition_column=NAME"
        )
        raise DataError(
            f"{table.name} has no column {column!r}, the class to draw; it has {table.listed_columns}{near}"
        )
    passed = [name for name in table.columns if name not in {*RESERVED_COLUMNS, IMAGES}]
    prompts = list[Prompt]()
    digest = hashlib.sha256()
    for row in table:
        label = class_of(row, column, num_classes)
        values = {name: row.values.get(name) for name in passed} | {column: label}
        content = str(row.values.get("prompt", label))
        prompt = Prompt(row=row.number, content=content, columns=values)
        digest.update(json.dumps([prompt.content, values], default=str).encode())
        prompts.append(prompt)
    return PromptSet(prompts, tuple(passed), digest.hexdigest, is_chat=False)


def class_of(row: TableRow, column: str, num_classes: int) -> int:
    """Return the class of a row; DataError where it is none that the model knows."""
    value: Any = row.values.get(column)
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_classes:
        problem = "missing" if value is None else f"{value!r:.80}"
        raise DataError(
            f"the condition {column!r} is {problem} in {row.place}; it is a class of the model, a whole number from 0 to "
            f"{num_classes - 1}: correct or remove the row"
        )
    return value
