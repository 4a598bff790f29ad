"""Make a table and a picture of the counts of `coordination`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

FLAT = 1.2
"""Processor seconds of a controller of 64, over those of a controller of 2: at most this much."""


def as_markdown(results: Mapping[str, Any]) -> str:
    """Write the table, ready to paste."""
    job = results["job"]
    rounds = f"{job['rounds']} rounds of {job['groups']} groups x {job['group_size']} completions a controller"
    lines = [
        f"{rounds}, {job['payload_bytes'] / 1e6:g} MB a prompt.",
        "",
        "| N | parallel: CPU s a controller | busiest | MB through the busiest | central: CPU s | MB through it |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for parallel_row, central_row in zip(results["parallel"], results["central"], strict=True):
        seconds = f"{parallel_row['cpu_s_mean']:.2f} | {parallel_row['cpu_s_busiest']:.2f}"
        parallel = f"{seconds} | {parallel_row['bytes_busiest'] / 1e6:.0f}"
        central = (
            f"{central_row['cpu_s_busiest']:.2f} | {central_row['bytes_busiest'] / 1e6:.0f}"
        )
        lines.append(f"| {parallel_row['controllers']} | {parallel} | {central} |")
    lines += ["", _verdict(results), "", _machine(results["machine"])]
    return "\n".join(lines)


def _verdict(results: Mapping[str, Any]) -> str:
    rows = {row["controllers"]: row for row in results["parallel"]}
    if 2 not in rows or len(rows) < 2:
        return "Too few rows to compare."
    last = max(rows)
    by_mean = rows[last]["cpu_s_mean"] / rows[2]["cpu_s_mean"]
    by_busiest = rows[last]["cpu_s_busiest"] / rows[2]["cpu_s_busiest"]
    central = results["central"][-1]["cpu_s_busiest"] / results["central"][0]["cpu_s_busiest"]
    verdict = "holds" if by_mean <= FLAT else "misses"
    return (
        f"{last} over 2 controllers: CPU seconds of a controller x {by_mean:.2f} ({verdict} <= {FLAT:g}), of the busiest "
        f"x {by_busiest:.2f}. The central one, {results['central'][-1]['engines']} over 1 engines: x {central:.1f}."
    )


def _machine(machine: Mapping[str, Any]) -> str:
    return f"Machine: {machine['cores']} cores of {machine['processor']}, {machine['memory_gib']} GiB."


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw processor seconds and megabytes of the busiest process over N, central and parallel, on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for label, key in (
        ("one central controller", "central"),
        ("N parallel controllers", "parallel"),
    ):
        rows = results[key]
        over = [row["engines"] for row in rows]
        axes[0].plot(over, [row["cpu_s_busiest"] for row in rows], marker="o", label=label)
        axes[1].plot(
            over, [row["bytes_busiest"] / 1e6 for row in rows], marker="o", label=label
        )
    for axis, name in zip(axes, ("CPU seconds", "MB"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xlabel("N engines")
        axis.set_ylabel(f"{name}, busiest controller")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
