"""How many GPUs a run would see, counted without torch: for the dry run, which must be quick.

Not here: what the trainer really uses; that is accelerate's to say when the run starts.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path


def num_gpus(environment: Mapping[str, str] | None = None, *, device_files: Path = Path("/dev")) -> int:
    """NVIDIA GPUs that this process may use and `CUDA_VISIBLE_DEVICES` lets through; 0 on a machine without."""
    present = sum(1 for file in device_files.glob("nvidia*") if re.fullmatch(r"nvidia\d+", file.name))
    visible = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    chosen = [part.strip() for part in visible.split(",") if part.strip()]
    return min(present, len(chosen[: chosen.index("-1")] if "-1" in chosen else chosen))
