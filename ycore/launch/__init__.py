"""Start and watch the processes of a run on this machine, and leave none of them behind.

Read `launcher` first. This file imports nothing at the top, so that the guardian's process stays small.
"""

from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from ycore.config.schema import RunConfig, TuneConfig


def run(
    config: "RunConfig | TuneConfig",
    *,
    resume: bool = False,
    num_steps: int | None = None,
    stream: TextIO | None = None,
) -> dict[str, Any]:
    """Train in the foreground.

    Args:
        resume: continue the run in the config's output folder instead of beginning a new one.
        num_steps: steps that the progress bar counts to, where the config does not say it.
        stream: where progress is shown; standard output by default.

    Returns:
        The content of summary.json; with `stop_asked` when the run finished although it was asked to stop.

    Raises:
        YcoreError: why the run failed, or Interrupted.
    """
    from ycore.launch.launcher import TRAINER, run_worker

    return run_worker(TRAINER, config, resume=resume, num_steps=num_steps, stream=stream)


def evaluate(config: "RunConfig", *, stream: TextIO | None = None) -> dict[str, Any]:
    """Evaluate in the foreground; the summary, with the metrics of eval.json."""
    from ycore.launch.launcher import EVALUATOR, run_worker

    return run_worker(EVALUATOR, config, stream=stream)


def preflight(config: "RunConfig", *, stream: TextIO | None = None) -> dict[str, Any]:
    """Run one small round before any training, in the foreground; the summary, with what was measured."""
    from ycore.launch.launcher import PREFLIGHT, run_worker

    return run_worker(PREFLIGHT, config, stream=stream)
