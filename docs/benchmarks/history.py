"""The quickstart's figures at several commits, in turns: `python docs/benchmarks/history.py --commits A B HEAD`.

Each commit is checked out beside this clone's environment: a regression is a row that is slower than the one above it.
A commit whose pinned versions differ from the installed ones is measured with the installed ones.

It runs `ycore grpo --recipe quickstart --steps 5` for each commit, `--repeats` times round by round, so that a machine
that slows down slows all commits alike. It prints a table, oldest first: the seconds from the command to the end of the
first step, to the prompt, and the medians of the steps after the first and of their parts. Everything goes to
`history.json` in the output folder. A run takes about a minute on two cores; run it on an idle machine.
"""

import argparse
import json
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from bounded import RunFailed, run_bounded
from contestants import read_lines
from machine import describe_machine
from watched import MetricsWatch

CLONE = Path(__file__).resolve().parents[2]
PACKAGES = {
    "ycore": "ycore",
    "cli": "ycore_cli",
    "docs": "ycore_docs",
    "recipes": "ycore_recipes",
}
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
"""Nothing is fetched, and a commit's files are not hidden by those of this clone."""
PARTS = ("sync", "round", "train")


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds of one run: to the end of its first step, to the prompt, of a later step, and of that step's parts."""

    first_step: float
    whole: float
    step: float
    sync: float
    round: float
    train: float


class FirstStep(MetricsWatch):
    """Watches a run for the end of its first step, and keeps the seconds until then."""

    def __init__(self, metrics: Path) -> None:
        super().__init__(metrics)
        self.seconds: float | None = None
        self._began = time.monotonic()

    def see(self, num_steps: int) -> None:
        if num_steps and self.seconds is None:
            self.seconds = time.monotonic() - self._began


@contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    """Check a commit out into `folder`; yield a Python that imports it, and the installed packages beside it."""
    tree = folder / "tree"
    _git("worktree", "add", "--quiet", "--detach", str(tree), commit)
    try:
        environment = folder / "environment"
        venv.create(environment, symlinks=True)
        paths = {"base": str(environment), "platbase": str(environment)}
        site = Path(sysconfig.get_path("purelib", "venv", paths))
        installed = [path for path in sys.path if Path(path).name == site.name]
        (site / "installed.pth").write_text("\n".join(installed) + "\n")
        for name, package in PACKAGES.items():
            (site / package).symlink_to(tree / name)
        yield environment / "bin" / "python"
    finally:
        _git("worktree", "remove", "--force", str(tree))


def run_quickstart(python: Path, folder: Path, *, steps: int, timeout_s: float) -> Figures:
    """Run the quickstart once in `folder` and return its figures; RunFailed where it fails."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    start = "from ycore_cli import start; start()"
    options = f"grpo --recipe quickstart --steps {steps} --output run".split()
    metrics = folder / "run" / "metrics.jsonl"
    with FirstStep(metrics) as first:
        whole = run_bounded(
            [str(python), "-P", "-c", start, *options],
            folder=folder,
            environment=ENVIRONMENT,
            timeout_s=timeout_s,
            stop=threading.Event(),
        )
    if first.seconds is None:
        raise RunFailed(f"no step was seen in {metrics}")
    rows = read_lines(metrics)[1:]
    step, *parts = (
        median(row[f"ycore/time/{name}"] for row in rows) for name in ("step", *PARTS)
    )
    return Figures(first.seconds, whole, step, *parts)


def as_table(figures: Mapping[str, Sequence[Figures]]) -> str:
    """Write a line for each commit: medians over its runs."""
    columns = ("first_step", "whole", "step", *PARTS)
    lines = [f"{'commit':<28}" + "".join(f"{name:>11}" for name in columns)]
    for commit, runs in figures.items():
        medians = [median(getattr(run, name) for run in runs) for name in columns]
        lines.append(f"{commit:<28}" + "".join(f"{seconds:>11.2f}" for seconds in medians))
    return "\n".join(lines)


def measure(arguments: argparse.Namespace) -> dict[str, list[Figures]]:
    """Run each commit in turns; return the figures of its runs by its short name and date, oldest first."""
    dated = sorted(
        _git("show", "--no-patch", "--format=%ct %h %cs", commit).split()
        for commit in arguments.commits
    )
    figures: dict[str, list[Figures]] = {f"{name} {day}": [] for _, name, day in dated}
    for _ in range(arguments.repeats):
        for (_, name, _), runs in zip(dated, figures.values(), strict=True):
            with checked_out(name, arguments.output / name) as python:
                run = arguments.output / name / "work"
                runs.append(
                    run_quickstart(
                        python, run, steps=arguments.steps, timeout_s=arguments.timeout
                    )
                )
            print(f"{name}: first step after {runs[-1].first_step:.1f} s", file=sys.stderr)
            shutil.rmtree(arguments.output / name)
    return figures


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(CLONE), *words], check=True, capture_output=True, text=True
    )
    return done.stdout


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--commits", nargs="+", default=["HEAD~20", "HEAD"], help="names that git knows")
    add("--repeats", type=int, default=1, help="runs of each commit")
    add("--steps", type=int, default=5, help="at least 2: the first is not counted")
    add("--timeout", type=float, default=600.0, help="seconds that a run may take")
    add("--output", type=Path, default=Path("runs/history"), help="a new folder")
    parsed = parser.parse_args(arguments)
    parsed.output = parsed.output.resolve()
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = parse(arguments)
    if parsed.steps < 2:
        print(f"error: --steps must be at least 2; it is {parsed.steps}", file=sys.stderr)
        return 2
    if parsed.output.exists():
        print(f"error: --output must be new; {parsed.output} exists", file=sys.stderr)
        return 2
    parsed.output.mkdir(parents=True)
    try:
        figures = measure(parsed)
    except subprocess.CalledProcessError as problem:
        print(f"failed: {problem.stderr.strip()}", file=sys.stderr)
        return 1
    except RunFailed as problem:
        print(f"failed: {problem}", file=sys.stderr)
        return 1
    by_commit = {name: [asdict(run) for run in runs] for name, runs in figures.items()}
    results = {"machine": describe_machine(), "commits": by_commit}
    (parsed.output / "history.json").write_text(json.dumps(results, indent=2) + "\n")
    print(as_table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
