"""From a RunConfig to processes, and to nothing left behind: the node's supervisor.

Order of reading: `launcher`, then `engines`, `processes`, `guardian`, `reaper`. `environment` is `ycore env`.

Not here: what a role does once it runs (`roles`). This file imports nothing, so that the guardian stays small.
"""

from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from ycore.config.schema import RunConfig, TuneConfig


def run(config: "RunConfig", *, resume: bool = False, stream: TextIO | None = None) -> dict[str, Any]:
    """Train in the foreground and return the summary; progress goes to `stream`, or to standard output."""
    from ycore.launch.launcher import run_training

    return run_training(config, resume=resume, stream=stream)


def tune(
    config: "TuneConfig", *, num_steps: int | None = None, resume: bool = False, stream: TextIO | None = None
) -> dict[str, Any]:
    """Train on given examples in the foreground and return the summary."""
    from ycore.launch.launcher import run_tuning

    return run_tuning(config, num_steps=num_steps, resume=resume, stream=stream)


def evaluate(config: "RunConfig", *, stream: TextIO | None = None) -> dict[str, Any]:
    """Evaluate in the foreground and return the summary."""
    from ycore.launch.launcher import run_evaluation

    return run_evaluation(config, stream=stream)


def preflight(config: "RunConfig", *, stream: TextIO | None = None) -> dict[str, Any]:
    """One small round before any training, in the foreground; the summary with what was measured."""
    from ycore.launch.launcher import PREFLIGHT, run_worker

    return run_worker(PREFLIGHT, config, resume=False, stream=stream)
