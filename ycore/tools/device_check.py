"""`ycore doctor --gpu`: whether a run's path on a device works here, with figures, in about ten minutes.

Each part runs in a process of its own, so that one that dies or hangs spoils no other. With `--device cpu` a part does
what a CPU can, and the report says what was not run. One part alone, which prints its figures:

    python -m ycore.tools.device_check device_training.replay_lora FOLDER
"""

import importlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ycore.errors import ConfigError, YcoreError
from ycore.launch.gpus import Gpu, ask_driver, visible_gpus
from ycore.launch.guardian import RunWatch, remove_leftovers
from ycore.run.paths import RunFolder
from ycore.run.text import Say
from ycore.tools.doctor import Check, check, gpu_checks, torch_cuda

_ENDS_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Part:
    """`work`: module and function. `left_out`: what of it needs a GPU; `on_cpu`: whether a CPU does the rest."""

    work: str
    limit_s: float
    left_out: str
    on_cpu: bool = True


PARTS = {
    "device": Part(
        "device_training.device",
        120,
        "torch's view of the device, and a product on it",
        on_cpu=False,
    ),
    "replay-lora": Part("device_training.replay_lora", 120, "losses of a device against the CPU's"),
    "replay-full": Part("device_training.replay_full", 120, "losses of a device against the CPU's"),
    "attention": Part(
        "device_training.attention", 180, "flash attention, 2k to 32k tokens, the device's memory"
    ),
    "sync": Part("device_training.sync", 90, "1.3 billion weights over the bus"),
    "engines": Part(
        "device_engines.engines", 300, "memory that a sleep frees, and another process in it"
    ),
    "steps": Part("device_training.steps", 300, "memory and time of a device against the plan"),
}


def device_report(
    say: Say, *, on: Literal["gpu", "cpu"] = "gpu", parts: Sequence[str] = tuple(PARTS)
) -> dict[str, Any]:
    """Run the parts; `say` gets a line as each begins and ends.

    Returns:
        `ok`: whether all that ran has passed; `device`: its name, None for a CPU; `checks`, as of `ycore doctor`;
        `not_run`: by part, what of it was left out.
    """
    gpus = () if on == "cpu" else visible_gpus()
    if on == "gpu" and not gpus:
        raise ConfigError("doctor --gpu needs an NVIDIA GPU, and the driver lists none; add --device cpu for the parts "
                          "that a CPU can do")  # fmt: skip
    name = gpus[0].name if gpus else None
    say(
        f"on {name}, the first of {len(gpus)}"
        if gpus
        else "on the CPU: nothing of this is shown of a GPU"
    )
    checks: list[Check] = _driver_checks(gpus, say) if gpus else []
    not_run: dict[str, str] = {}
    for part in parts:
        say(f"{part} ...")
        if not gpus:
            not_run[part] = PARTS[part].left_out
        if gpus and any(one["name"] == "device" and not one["ok"] for one in checks):
            not_run[part] = "all of it: the part `device` failed"
        if part not in not_run or (not gpus and PARTS[part].on_cpu):
            with tempfile.TemporaryDirectory(prefix="ycore-doctor-") as folder:
                found = _run(part, Path(folder), device=gpus[0].id if gpus else None)
            say(f"  {'pass' if found['ok'] else 'FAIL'}: {found['value']}")
            checks.append(found)
        if part in not_run:
            say(f"  not run: {not_run[part]}")
    return {
        "ok": all(one["ok"] for one in checks),
        "device": name,
        "checks": checks,
        "not_run": not_run,
    }


def _driver_checks(gpus: Sequence[Gpu], say: Say) -> list[Check]:
    """Driver, compute capability and free memory, as `ycore env` has them."""
    found = list(
        gpu_checks(
            gpus, torch_cuda=torch_cuda(), links=ask_driver(("topo", "-m")) if len(gpus) > 1 else ""
        )
    )
    for one in found:
        mend = f"; {one['mend']}" if one["mend"] else ""
        say(f"  {'pass' if one['ok'] else 'FAIL'}: {one['name']}: {one['value']}{mend}")
    return found


def _run(name: str, folder: Path, *, device: str | None) -> Check:
    """One part in a process; the check holds its last line."""
    shown = {
        "CUDA_VISIBLE_DEVICES": device or "",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }  # the driver's order
    slow = PARTS[name].limit_s * (1 if device is not None else 3)
    part = subprocess.Popen(
        [sys.executable, "-P", "-m", "ycore.tools.device_check", PARTS[name].work, str(folder)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", **shown},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = part.communicate(timeout=slow)
        last = said.strip().rpartition("\n")[2] or f"exit status {part.returncode}"
        return check(
            name, last, ok=part.returncode == 0, mend="see docs/gpu.md for what this part does"
        )
    except subprocess.TimeoutExpired:
        return check(
            name,
            f"no end after {slow:.0f} s",
            ok=False,
            mend="see docs/gpu.md for what this part does",
        )
    finally:
        part.terminate()  # as Ctrl-C: it ends what it has started
        with suppress(subprocess.TimeoutExpired):
            part.wait(_ENDS_WITHIN_S)
        part.kill()
        run = RunFolder(folder)
        RunWatch(run.run_id).kill(grace_s=0)
        remove_leftovers(run)


def main(work: str, folder: str) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    module, _, function = work.partition(".")
    try:
        print(getattr(importlib.import_module(f"ycore.tools.{module}"), function)(Path(folder)))
    except YcoreError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
