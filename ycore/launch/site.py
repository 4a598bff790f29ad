"""Where a run runs on this machine: its folder here, its ranks, the cores and devices they have.

Not here: which engines go where (`engines`), and what the ranks are told (`layout`).
"""

from dataclasses import dataclass
from pathlib import Path

from ycore.config.kinds import AnyConfig
from ycore.errors import ConfigError
from ycore.launch.engines import Machine, this_machine
from ycore.launch.layout import ONE_RANK, Layout, layout_of
from ycore.run_folder.paths import RunFolder


@dataclass(frozen=True, slots=True)
class Site:
    """`folder` is the run's own on the first machine, and `node-1`, `node-2`, ... inside it on the others."""

    folder: RunFolder
    layout: Layout
    machine: Machine


def site_of(config: AnyConfig, *, trains: bool = True) -> Site:
    """This machine's part of the run; ConfigError where it has not what the ranks need."""
    machine = this_machine()
    layout = layout_of(config, on_cpu=not machine.devices) if trains else ONE_RANK
    has = machine.devices or machine.cores
    if layout.local > len(has):
        kind = "devices" if machine.devices else "cores"
        rule = f"every process needs {kind} of its own"
        raise ConfigError(f"{rule}; there are {layout.local} processes and {len(has)} {kind}; ask for fewer")
    home = Path(config.output)
    folder = RunFolder(home if layout.machine_rank == 0 else home / f"node-{layout.machine_rank}")
    return Site(folder, layout, machine)


def rank_cores(machine: Machine, layout: Layout) -> list[list[int]] | None:
    """On CPU each rank's own share of the cores; None where ranks need not be kept apart."""
    if machine.devices or layout.accelerate is None:
        return None
    bounds = [len(machine.cores) * rank // layout.local for rank in range(layout.local + 1)]
    return [list(machine.cores[bounds[rank] : bounds[rank + 1]]) for rank in range(layout.local)]
