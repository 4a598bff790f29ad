"""Start `ycore` as its users do, in a process of its own, and make the small inputs that most tests need.

`ycore("grpo --steps 2 ...", cwd=folder)` runs a command to its end and checks its exit status; `start_ycore` leaves it
running. The scripted engine is a test tool: it answers as vLLM's server does, from a script and without a model.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COMMAND = (
    sys.executable,
    "-c",
    "import sys; from ycore_cli.main import main; sys.exit(main())",
)
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "80"}

HANG_S = 900
"""A test that takes longer hangs. No test depends on how fast the machine is."""


def command_line(
    words: str | Sequence[str], *, scripted_engine: Mapping[str, str] | None = None
) -> list[str]:
    """The argument vector of `ycore WORDS`; with `scripted_engine` its rollout engines are scripted ones."""
    arguments = words.split() if isinstance(words, str) else [str(word) for word in words]
    if scripted_engine is None:
        return [*COMMAND, *arguments]
    return [
        sys.executable,
        "-m",
        "tests.chaos.command",
        json.dumps(dict(scripted_engine)),
        *arguments,
    ]


def ycore(
    words: str | Sequence[str],
    *,
    cwd: Path,
    status: int | None = 0,
    environment: Mapping[str, str] | None = None,
    scripted_engine: Mapping[str, str] | None = None,
    timeout_s: float = HANG_S,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with its output captured. `status` is the expected exit status; None takes any."""
    completed = subprocess.run(
        command_line(words, scripted_engine=scripted_engine),
        cwd=cwd,
        env=_environment(environment),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if status is not None:
        assert completed.returncode == status, completed.stderr or completed.stdout
    return completed


def ycore_json(
    words: str | Sequence[str], *, cwd: Path, environment: Mapping[str, str] | None = None
) -> Any:
    """Run a command with `--json` to its end, and return the one object that it prints."""
    arguments = words.split() if isinstance(words, str) else list(words)
    completed = ycore([*arguments, "--json"], cwd=cwd, environment=environment)
    assert completed.stdout.count("\n") == 1, completed.stdout
    return json.loads(completed.stdout)


def start_ycore(
    words: str | Sequence[str],
    *,
    cwd: Path,
    log: Path | None = None,
    environment: Mapping[str, str] | None = None,
    scripted_engine: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Start a command in a session of its own. What it prints goes to `log`, or else to the pipes of the process."""
    command = command_line(words, scripted_engine=scripted_engine)
    if log is None:
        return subprocess.Popen(
            command,
            cwd=cwd,
            env=_environment(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=cwd,
            env=_environment(environment),
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,
        )


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write a JSON Lines file, one row a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _environment(more: Mapping[str, str] | None) -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT, **(more or {})}
