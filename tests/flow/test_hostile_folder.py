"""A flow model's folder that somebody else wrote is read or refused in a line."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ycore.errors import ModelError
from ycore.flow.flow_inputs import FlowFolder

SCHEDULE = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 1.0}
NETWORK = {
    "_class_name": "DiTTransformer2DModel",
    "num_embeds_ada_norm": 3,
    "sample_size": 4,
    "in_channels": 1,
}


def write_folder(root: Path, *, schedule: bytes, network: bytes) -> Path:
    (root / "scheduler").mkdir()
    (root / "transformer").mkdir()
    (root / "scheduler" / "scheduler_config.json").write_bytes(schedule)
    (root / "transformer" / "config.json").write_bytes(network)
    return root


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("schedule", "network", "said"),
    [
        (b"[" * 100_000, as_json(NETWORK), "cannot be read as JSON"),
        (b"[]", as_json(NETWORK), "must hold a JSON object"),
        (as_json(SCHEDULE), b"null", "must hold a JSON object"),
        (as_json({"_class_name": 5}), as_json(NETWORK), "its scheduler is 5"),
        (as_json(SCHEDULE | {"shift": "x"}), as_json(NETWORK), "'x'"),
        (as_json(SCHEDULE), as_json(NETWORK | {"sample_size": [1, 2, 3]}), "too many values"),
        (as_json(SCHEDULE), as_json(NETWORK | {"in_channels": float("inf")}), "infinity"),
        (as_json(SCHEDULE), as_json({"_class_name": NETWORK["_class_name"]}), "without a"),
        (
            as_json(SCHEDULE),
            as_json({key: NETWORK[key] for key in NETWORK if key != "sample_size"}),
            "sample_size",
        ),
    ],
)
def test_settings_that_are_none_are_refused(
    schedule: bytes, network: bytes, said: str, tmp_path: Path
) -> None:
    root = write_folder(tmp_path, schedule=schedule, network=network)
    with pytest.raises(ModelError, match=said):
        FlowFolder(root)


def test_a_file_without_end_is_not_read(tmp_path: Path) -> None:
    root = write_folder(tmp_path, schedule=as_json(SCHEDULE), network=as_json(NETWORK))
    assert FlowFolder(root).shape == (1, 4, 4)
    os.truncate(root / "transformer" / "config.json", 20 * 2**30)
    with pytest.raises(ModelError, match="at most"):
        FlowFolder(root)
