"""Run `ycore` in a fork of a process that has loaded its modules: the same command, a second sooner."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_LOADED = (
    "ycore_cli.main",
    "ycore_recipes",
    "ycore.api.running",
    "ycore.config.learners",
    "ycore.evaluation.held_out",
    "ycore.scoring.group_rewards",
    "jinja2",
    "numpy",
)
"""Modules that dry runs import."""


class WarmCommand:
    """Runs command lines one after the other, each in a process, a folder and an environment of its own."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    def run(
        self, words: list[str], *, cwd: Path, env: dict[str, str], scratch: Path
    ) -> "subprocess.CompletedProcess[str]":
        """Run `ycore WORDS` in `cwd`; its output is kept in `scratch` meanwhile, a folder that exists."""
        outputs = [scratch / "stdout", scratch / "stderr"]
        request = {"words": words, "cwd": str(cwd), "env": env, "outputs": [*map(str, outputs)]}
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        code = int(self._server.stdout.readline())
        stdout, stderr = (path.read_text(encoding="utf-8") for path in outputs)
        return subprocess.CompletedProcess(words, code, stdout, stderr)

    def close(self) -> None:
        self._server.communicate()


def _become(request: dict[str, Any]) -> None:
    """Take the request's folder, environment and outputs, and run the command; this process ends with it."""
    from ycore_cli.main import main

    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, path in enumerate(request["outputs"], start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.argv = ["ycore", *request["words"]]
    sys.path[0] = ""  # as of `python -c`
    main()


def _serve() -> None:
    for name in _LOADED:
        importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _become(json.loads(line))
            return
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    _serve()
