"""ycore's own command with the scripted engine in vLLM's place: `python -m ycore.selftest.command OPTIONS grpo ...`.

Everything else is what a person starts: the same command line, launcher, guardian, trainer and reward workers. Only
here, before the launcher is imported, is the engine's command exchanged; the product knows no way to ask for it.

Not here: the scripted engine (`scripted_engine`), and starting this (`runs`).
"""

import importlib.metadata
import json
import sys
from collections.abc import Mapping
from typing import Any

ENGINE_MODULE = "ycore.selftest.scripted_engine"


def engine_words(engine: Any, options: Mapping[str, str]) -> list[str]:
    """The scripted engine's command line, where vLLM's would be."""
    own = [word for name, value in options.items() for word in (name, value)]
    return [sys.executable, "-m", ENGINE_MODULE, "--model", str(engine.model), "--uds", str(engine.socket), *own]


def main() -> None:
    """`OPTIONS` is a JSON object of the scripted engine's own options."""
    options = json.loads(sys.argv[1])
    sys.argv = ["ycore", *sys.argv[2:]]
    from ycore.engine import commands as rollout

    # Whoever imports the function after this line gets ours.
    rollout.server_command = lambda engine, **_: engine_words(engine, options)
    from ycore.launch import engines

    engines.is_vllm_installed = lambda: True
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="ycore")
    command.load()()


if __name__ == "__main__":
    main()
