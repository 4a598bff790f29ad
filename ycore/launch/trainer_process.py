"""Start the trainer: one process, or its ranks with accelerate's launcher and the allocator of their slots."""

import os
import sys
from collections.abc import Mapping

import yaml

from ycore.config.schema import BaseConfig, TuneConfig
from ycore.engine.kinds import KINDS
from ycore.launch.layout import Site
from ycore.launch.processes import ManagedProcess, RankedTrainer
from ycore.placement.placement import ALLOCATOR
from ycore.run.files import read_json
from ycore.run.secrets import secrets_environment

_KEEP_FREED = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "67108864",
}
"""glibc keeps the large blocks that a step frees. By default the kernel takes them, and clears them for the next."""


def start_trainer(
    config: BaseConfig, site: Site, *, name: str, module: str
) -> ManagedProcess | RankedTrainer:
    """Start `python -m MODULE RUN_FOLDER`, once or for every rank of this machine."""
    folder = site.folder
    layout = site.layout
    environment = worker_environment(config, on_cpu=not site.machine.devices)
    environment |= site.trainer_environment
    launcher: list[str] = []
    if layout.accelerate is not None:
        settings = folder.root / "accelerate.yaml"
        settings.write_text(yaml.safe_dump(dict(layout.accelerate)), encoding="utf-8")
        launcher = [
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            str(settings.resolve()),
        ]
        num_threads = max(1, len(site.machine.cores) // layout.local)
        environment["OMP_NUM_THREADS"] = str(num_threads)
    process = ManagedProcess(
        name,
        [sys.executable, *launcher, "-m", module, str(folder.root.resolve())],
        environment=environment,
        run_id=folder.run_id,
        log=folder.log(name),
    )
    if layout.accelerate is None:
        return process
    allocator = _start_allocator(site, environment)
    return RankedTrainer(process, folder, num_ranks=layout.local, allocator=allocator)


def _start_allocator(site: Site, environment: Mapping[str, str]) -> ManagedProcess | None:
    """Start the process that places the requests of several ranks. It lives as long as they do."""
    folder = site.folder
    num_ranks = site.layout.local
    kind = KINDS.get(read_json(folder.engines)["kind"])  # None for a run on given examples
    if num_ranks == 1 or kind is None or not kind.has_servers:
        return None
    socket = folder.socket(ALLOCATOR)
    socket.unlink(missing_ok=True)  # a killed allocator leaves its socket
    return ManagedProcess(
        ALLOCATOR,
        [sys.executable, "-m", "ycore.placement.service", str(socket), str(num_ranks)],
        environment=environment,
        run_id=folder.run_id,
        log=folder.log(ALLOCATOR),
    )


def worker_environment(config: BaseConfig, *, on_cpu: bool = False) -> dict[str, str]:
    """Return this process's environment with defaults for what it leaves unset, and with the config's secrets."""
    return {
        # Threads that wait for each other by spinning take ten times as long where another process wants a core too.
        "GOMP_SPINCOUNT": "10000",
        **(_KEEP_FREED if on_cpu and isinstance(config, TuneConfig) else {}),
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "SPT_NOENV": "1",
        **secrets_environment(config.model_dump(mode="json")),
    }
