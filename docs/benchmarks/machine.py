"""A description of the machine on which figures are measured."""

from typing import Any

import psutil

from ycore.launch import layout
from ycore.run.claim import installed_versions


def describe_machine() -> dict[str, Any]:
    """As a recipe's band describes it, and the versions."""
    versions = {
        name: version for name, version in installed_versions().items() if version is not None
    }
    return layout.describe_machine() | {"versions": versions}


def busy_share() -> float:
    """How much of the processor others use, over the next second: 0 for nothing, 1 for all of it."""
    percent: float = psutil.cpu_percent(interval=1.0)
    return percent / 100
