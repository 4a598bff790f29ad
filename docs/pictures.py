"""Make the pictures of the docs from a real run: its report in a real browser, and its live view.

    python docs/pictures.py runs/quickstart

    python docs/pictures.py runs/see-and-add

Needs Chromium on the path, and a finished run of any recipe. Of a run whose prompts show pictures it makes `see.png`,
without Chromium: what was asked, and the answers before and after.
"""

import argparse
import io
import math
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from rich.console import Console

from ycore.run.files import ImageStore, RunFolder
from ycore.view.activity import RunActivity
from ycore.view.pictures import new_figure, save_png
from ycore.view.progress import RunView
from ycore.view.report import make_report, read_run, write_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
HERE = Path(__file__).parent


def photograph(page: Path, picture: Path, *, width: int, height: int) -> None:
    """The page as the browser draws it."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"no browser: none of {', '.join(BROWSERS)} is on the path; install Chromium")
    with tempfile.TemporaryDirectory() as profile:
        size = [
            f"--window-size={width},{height}",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
        ]
        command = [
            browser,
            *QUIET.split(),
            *size,
            f"--screenshot={picture.resolve()}",
            page.resolve().as_uri(),
        ]
        subprocess.run(command, check=True, timeout=120, capture_output=True)


def live_view(run: Path, page: Path) -> tuple[int, int]:
    """The live view after the run's last step, as the terminal draws it; the page's width and height."""
    record = read_run(run)
    view = RunView(record.description.config.steps, look=RunActivity(run).look)
    for row in record.metrics:
        view.add(row)
    console = Console(
        record=True, width=80, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(view)
    drawn = console.export_svg(title=f"ycore report {record.name} --live")
    page.write_text(drawn, encoding="utf-8")
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn)
    assert size is not None, "rich's pictures begin with their size"
    return math.ceil(float(size[1])), math.ceil(float(size[2]))


def seen(run: Path, picture: Path) -> bool:
    """Draw the run's samples, if their prompts show pictures; whether they do."""
    store, samples = ImageStore(RunFolder(run).images), read_run(run).samples
    rows = [
        pair
        for pair in zip(samples["before"], samples["after"], strict=True)
        if pair[0].get("images")
    ]
    if not rows:
        return False
    columns = max(len(before["images"]) for before, _ in rows)
    figure = new_figure(8, 0.9 * len(rows) + 0.4)
    for number, (before, after) in enumerate(rows):
        for place, name in enumerate(before["images"]):
            axes = figure.add_subplot(
                len(rows), columns + 2, number * (columns + 2) + place + 1
            )
            axes.imshow(store.open(name))
            axes.axis("off")
        for place, (title, sample) in enumerate(
            (("before", before), ("after", after)), columns + 1
        ):
            axes = figure.add_subplot(len(rows), columns + 2, number * (columns + 2) + place)
            axes.axis("off")
            axes.text(
                0, 0.5, textwrap.fill(sample["completion"].strip(), 24), va="center", fontsize=9
            )
            if number == 0:
                axes.set_title(title, loc="left", fontsize=11)
    save_png(figure, picture)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--report-height", type=int, default=1900)
    told = parser.parse_args()
    if seen(told.run, HERE / "see.png"):
        return
    with tempfile.TemporaryDirectory() as scratch:
        report, terminal = Path(scratch) / "report.html", Path(scratch) / "live.svg"
        write_report(make_report([read_run(told.run)]), report)
        photograph(report, HERE / "report.png", width=1160, height=told.report_height)
        width, height = live_view(told.run, terminal)
        photograph(terminal, HERE / "live.png", width=width, height=height)


if __name__ == "__main__":
    main()
