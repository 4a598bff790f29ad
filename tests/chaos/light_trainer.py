"""A trainer's process that learns nothing, so that it starts at once: `python -m tests.chaos.light_trainer FOLDER`.

For rows about what a run leaves behind, where the import of torch would be nearly all of a trial. It maps the dataset,
has the real reward workers score step after step, writes metrics, and stops when it is asked to.
"""

import asyncio
import mmap
import threading
from pathlib import Path
from typing import Any

from tests.scoring.pools import StartedPool
from ycore.config.resolve import read_config
from ycore.config.schema import RunConfig
from ycore.errors import Interrupted, RunError
from ycore.run.files import RunFolder
from ycore.run.interrupt import on_stop
from ycore.run.metrics import MetricsWriter
from ycore.run.reports import run_alone

MODULE = "tests.chaos.light_trainer"
_FAILS_ABOVE = 1.0  # a learning rate with which a real run's weights become NaN


def work(root: Path) -> None:
    """Until the config's steps are done."""
    stop = threading.Event()
    on_stop(stop.set)
    folder = RunFolder(root)
    config = read_config(folder)
    assert isinstance(config, RunConfig)
    with (
        Path(config.dataset).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ),
    ):
        asyncio.run(_score(folder, config, stop))


async def _score(folder: RunFolder, config: RunConfig, stop: threading.Event) -> None:
    metrics = MetricsWriter(folder.metrics)
    async with StartedPool(config, folder, config.rewards) as pool:
        for step in range(1, config.steps + 1):
            if stop.is_set():
                raise Interrupted(f"stopped after step {step - 1}")
            folder.step_began.touch()
            completion = [{"role": "assistant", "content": f"{step} + {step}"}]
            offered: dict[str, list[Any]] = {
                "prompts": ["1 + 1 ="],
                "completions": [completion],
                "completion_ids": [[1]],
            }
            (score,) = await pool.score(0, offered, step=step)
            reward = score.value or 0.0
            metrics.write({"step": step, "reward": reward, "ycore/time/step": 0.05})
            if (config.trl.get("learning_rate") or 0.0) > _FAILS_ABOVE:
                raise RunError(f"after step {step} a weight is nan")
            await asyncio.sleep(0.05)


if __name__ == "__main__":
    raise SystemExit(run_alone(work))
