"""The parts of the device check, each run in a process of its own, so that one that dies or hangs spoils no other.

`pytest -m gpu tests/gpu` runs them on the first visible device. `python -m tests.gpu --device cpu` runs what a CPU can
do of them. `python -m tests.gpu.check training_parts.replay_lora FOLDER` runs one part and prints its figures.
"""

import importlib
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ycore.errors import RunError, YcoreError
from ycore.launch.guardian import RunWatch, remove_leftovers
from ycore.run.files import RunFolder

_ENDS_WITHIN_S = 60.0
_CPU_SLOWDOWN = 3
"""How many times its limit a part may take on a CPU."""


@dataclass(frozen=True, slots=True)
class Part:
    """`work`: module and function. `needs_gpu`: what a CPU leaves out; `runs_on_cpu`: whether a CPU does the rest."""

    work: str
    limit_s: float
    needs_gpu: str
    runs_on_cpu: bool = True


PARTS = {
    "device": Part(
        "training_parts.device",
        120,
        "torch's view of the device, and a product on it",
        runs_on_cpu=False,
    ),
    "replay-lora": Part(
        "training_parts.replay_lora", 120, "losses of a device against the CPU's"
    ),
    "replay-full": Part(
        "training_parts.replay_full", 120, "losses of a device against the CPU's"
    ),
    "attention": Part(
        "training_parts.attention",
        240,
        "flash attention, 2k to 32k tokens, the device's memory",
    ),
    "sync": Part("training_parts.sync", 90, "1.3 billion weights over the bus"),
    "engines": Part(
        "engine_parts.engines", 300, "memory that a sleep frees, and another process in it"
    ),
    "steps": Part("training_parts.steps", 300, "memory and time of a device against the plan"),
    "ways": Part("run_parts.ways", 590, "engines that sleep, and what leaves the device"),
    "memory": Part(
        "run_parts.memory", 590, "the trainer's memory against the plan", runs_on_cpu=False
    ),
    "exact": Part("run_parts.exact", 240, "vLLM's batch-invariant kernels"),
    "seven": Part("run_parts.seven", 590, "a model of 7 billion parameters", runs_on_cpu=False),
}


def run_part(name: str, folder: Path, *, device: str | None) -> str:
    """Run one part in a process and return its figures; RunError where it fails or does not end in time.

    Args:
        folder: an empty folder for the part.
        device: what CUDA_VISIBLE_DEVICES takes; None runs the part on the CPU.
    """
    variables = {"CUDA_VISIBLE_DEVICES": device or "", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    limit_s = PARTS[name].limit_s * (_CPU_SLOWDOWN if device is None else 1)
    part = subprocess.Popen(
        [sys.executable, "-P", "-m", "tests.gpu.check", PARTS[name].work, str(folder)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = part.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise RunError(f"{name}: no end after {limit_s:.0f} s") from None
    finally:
        part.terminate()  # ends what it has started, as Ctrl-C does
        with suppress(subprocess.TimeoutExpired):
            part.wait(_ENDS_WITHIN_S)
        part.kill()
        run = RunFolder(folder)
        RunWatch(run.run_id).kill(grace_s=0)
        remove_leftovers(run)
    last_line = output.strip().rpartition("\n")[2] or f"exit status {part.returncode}"
    if part.returncode != 0:
        raise RunError(f"{name}: {last_line}")
    return last_line


def main(work: str, folder: str) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    module, _, function = work.partition(".")
    try:
        print(getattr(importlib.import_module(f"tests.gpu.{module}"), function)(Path(folder)))
    except YcoreError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
