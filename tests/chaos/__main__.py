"""`python -m tests.chaos`, from the repository root: make the scorecard and print it."""

import argparse
import sys
from pathlib import Path

from tests.chaos.scorecard import plan_rows, run_scorecard, tiers_of
from ycore.errors import YcoreError
from ycore.run.files import write_json_atomic


def main() -> int:
    """Exit status 0 where every row passes."""
    options = make_parser().parse_args()
    tiers = tiers_of(options.engine)
    names = [name.strip() for name in options.rows.split(",") if name.strip()]
    if options.dry_run:
        print(*plan_rows(tiers, names=names, seed=options.seed), sep="\n")
        print("Nothing was started; leave out --dry-run to begin.")
        return 0
    results = run_scorecard(
        tiers,
        names=names,
        seed=options.seed,
        count=options.moments,
        parallel=options.parallel,
        output=options.output,
        say=lambda line: print(line, flush=True),
    )
    if options.json is not None:
        write_json_atomic(options.json.absolute(), results)
    return 0 if results["passes"] else 1


def make_parser() -> argparse.ArgumentParser:
    """The options of the scorecard."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--seed",
        type=int,
        default=0,
        help="every random choice of the scorecard follows from it (default 0)",
    )
    add(
        "--moments",
        type=int,
        default=30,
        help="kills of each role; the other rows scale with it (default 30)",
    )
    add(
        "--rows",
        default="",
        metavar="NAMES",
        help="only these rows, e.g. kill-trainer,kill-in-save",
    )
    add("--engine", default="scripted", help="scripted, vllm or both (default scripted)")
    add("--parallel", type=int, default=2, help="runs at a time (default 2)")
    add("--json", type=Path, metavar="FILE", help="write the scorecard as JSON")
    add(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="keep every run here; else they are removed at the end",
    )
    add(
        "--dry-run",
        action="store_true",
        help="list the rows and their first moments, and start nothing",
    )
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main())
    except YcoreError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
