"""The `ycore` command with the scripted engine in place of vLLM: `python -m tests.chaos.command OPTIONS grpo ...`.

Everything else is what a user starts: the command line, launcher, guardian, trainer and reward workers. Only the
engine's command is exchanged, here, before the launcher is imported; the product has no option for it.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ycore_cli

from ycore.run.interrupt import end_while_importing

ENGINE_MODULE = "tests.chaos.scripted_engine"


def engine_words(engine: Any, options: Mapping[str, str]) -> list[str]:
    """The scripted engine's command line, where vLLM's would be."""
    option_words = [word for name, value in options.items() for word in (name, value)]
    return [
        sys.executable,
        "-m",
        ENGINE_MODULE,
        "--model",
        str(engine.model),
        "--uds",
        str(engine.socket),
        *option_words,
    ]


def main() -> None:
    """`OPTIONS` is a JSON object of the scripted engine's own options.

    `cores` in it is how many cores the machine seems to have: its own, each several times. `trainer` in it is a module
    in the trainer's place; `begun` is a file that is made when the command's own first instruction is done. Until then
    Python is starting, and a signal ends it as it ends any program.
    """
    options = json.loads(sys.argv[1])
    end_while_importing()
    if (begun := options.pop("begun", None)) is not None:
        Path(begun).touch()
    sys.argv = ["ycore", *sys.argv[2:]]
    put_in_place(options)
    ycore_cli.start()


def put_in_place(options: dict[str, str]) -> None:
    """Exchange the engine's command of this process, and the trainer where the options name one."""
    trainer = options.pop("trainer", None)
    if (num_cores := options.pop("cores", None)) is not None:
        from ycore.plan import devices

        cores = devices.usable_cores()
        seeming = tuple(cores[number % len(cores)] for number in range(int(num_cores)))
        devices.usable_cores = lambda: seeming
    from ycore.engine import commands as rollout

    # Whoever imports the function after this line gets ours.
    rollout.engine_command = lambda engine: engine_words(engine, options)
    from ycore.engine import kinds

    kinds.is_vllm_installed = lambda: True
    if trainer is not None:
        from ycore.launch import launcher

        launcher.TRAINER = replace(launcher.TRAINER, module=trainer)


if __name__ == "__main__":
    main()
