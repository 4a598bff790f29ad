"""Following metrics.jsonl while another process writes it.

Not here: reading a finished file (`metrics.read_metrics`).
"""

from pathlib import Path
from typing import Any

from ycore.telemetry.metrics import parse_rows


class MetricsFollower:
    """Example: `for row in follower.read(): ...`, again and again; each whole row comes once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """The rows that were completed since the last call; from the start again where the file was cut shorter."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        return parse_rows(data[:whole].split(b"\n"))
