"""Make the band of a recipe from the runs of at least three seeds that `ycore recipes NAME` has left.

    python docs/benchmarks/band.py runs/reproduce-quickstart recipes/bands/quickstart.json

Each step has the interval in which one more run falls with 95 % (Student's t; a prediction interval, so it is wider than
that of the mean). The file names the machine and the versions.
"""

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from machine import hardware

from ycore.api.reproduce import curve_of, final_of, half_width, metric_of, rows_by_stage
from ycore.run.claim import installed_versions
from ycore.run.files import write_json_atomic
from ycore.run.metrics import Row

_NO_DIFFERENCE = 0.02


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return where one more value falls with 95 %: mean +- t * s * sqrt(1 + 1/n), and at least 2 % of the largest value.

    Seeds that all solve a task end equal, which does not say that the next one ends so to the digit.
    """
    half = half_width(values)
    if half is None:
        raise SystemExit(f"a band needs the runs of 3 seeds or more; there are {len(values)}")
    middle = statistics.fmean(values)
    reach = max(half * math.sqrt(len(values) + 1), _NO_DIFFERENCE * max(map(abs, values)))
    return middle - reach, middle + reach


def band_of(runs: Mapping[int, Sequence[Row]]) -> dict[str, Any]:
    """Make the band of one stage from its metrics by seed, as JSON values."""
    curves = [curve_of(rows) for rows in runs.values()]
    finals = {str(seed): round(final_of(rows), 4) for seed, rows in runs.items()}
    steps = zip(*curves, strict=False)
    return {
        "metric": metric_of(next(iter(runs.values()))),
        "finals": finals,
        "final": [round(end, 4) for end in interval([*finals.values()])],
        "steps": [[round(end, 4) for end in interval(values)] for values in steps],
    }


def make_band(
    runs: Mapping[int, Mapping[str, Sequence[Row]]], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Make the content of a band's file from finished runs by seed, each by stage."""
    bands = {
        stage: band_of({seed: stages[stage] for seed, stages in runs.items()})
        for stage in next(iter(runs.values()))
    }
    return {**about, **bands[""]} if list(bands) == [""] else {**about, "stages": bands}


def machine_in_words(machine: Mapping[str, Any]) -> str:
    """Describe a machine: `2 cores of AMD EPYC (avx2), 24 GiB`."""
    names = machine.get("devices", ())
    devices = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    flags = f" ({', '.join(machine['flags'])})" if machine.get("flags") else ""
    cores = f"{machine['cores']} cores of {machine['processor']}{flags}"
    return ", ".join([*devices, cores, f"{machine['memory_gib']} GiB"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, help="the folder that holds seed-0, seed-1, ...")
    parser.add_argument("output", type=Path)
    parser.add_argument(
        "--set", action="append", default=[], help="that the runs were made with"
    )
    arguments = parser.parse_args()
    folders = sorted(arguments.runs.glob("seed-*"))
    by_seed = {int(path.name.removeprefix("seed-")): rows_by_stage(path) for path in folders}
    about = {
        "recipe": arguments.output.stem,
        "sets": arguments.set,
        "machine": machine_in_words(hardware()),
        "versions": installed_versions(),
    }
    write_json_atomic(arguments.output, make_band(by_seed, about))
