"""`python -m tests.chaos.power`, from the repository root: record runs, cut their power, judge what is left."""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos.job import write_inputs
from tests.chaos.patches import copy_package
from tests.chaos.power.cuts import (
    CONTROLS,
    as_json,
    draw_cuts,
    judge_cuts,
    resume_cuts,
    run_controls,
)
from tests.chaos.power.proof import Subject, subject_of, unlike
from tests.chaos.power.scenarios import record, rollout_parts, tuning_parts
from tests.chaos.runs import Setting
from ycore.errors import RunError, YcoreError
from ycore.run.files import write_json_atomic

PARTS = {"rl": rollout_parts, "sft": tuning_parts}


def main() -> int:
    """Exit status 0 where every cut passes, every resume is equal, and every control fails."""
    options = make_parser().parse_args()
    if options.dry_run:
        print(
            f"{options.cuts} cuts of {', '.join(PARTS)}, {options.resumes} resumes, {len(CONTROLS)} controls"
        )
        print("Nothing was started; leave out --dry-run to begin.")
        return 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ycore-power-") as temporary:
        results = prove(Path(temporary).resolve(), options)
    results["seconds"] = round(time.monotonic() - began)
    if options.json is not None:
        write_json_atomic(options.json.absolute(), results)
    print(f"{'ok' if results['passes'] else 'FAIL'}, {results['seconds']} s")
    return 0 if results["passes"] else 1


def prove(place: Path, options: argparse.Namespace) -> dict[str, Any]:
    setting = Setting(
        place, scripted={"--think-s": "0.01"}, package=copy_package(place / "package")
    )
    subjects = recorded(place, setting)
    count, seed = options.cuts, options.seed
    print(f"{count} cuts, seed {seed} ...", flush=True)
    cuts = draw_cuts(subjects, count=count, seed=seed)
    judged = judge_cuts(cuts, say=_say)
    _say(f"{as_json(judged)['passed']}/{judged.total}: {dict(judged.outcomes)}")
    sample = random.Random(f"resumes/{seed}").sample(cuts, min(options.resumes, len(cuts)))
    _say(f"{len(sample)} of them resumed to the end ...")
    resumed = resume_cuts(sample, setting, say=_say)
    _say(f"{sum(resumed.outcomes.values())}/{resumed.total}: {dict(resumed.outcomes)}")
    _say(f"controls: {options.controls} cuts without one kind of flush each ...")
    failed_cuts = (
        run_controls(subjects, count=options.controls, seed=seed, say=_say)
        if options.controls
        else {}
    )
    return {
        "passes": not judged.failures and not resumed.failures and all(failed_cuts.values()),
        "seed": seed,
        "operations": {
            subject.recording.name: len(subject.recording.operations) for subject in subjects
        },
        "cuts": as_json(judged),
        "resumes": as_json(resumed),
        "controls": {
            "found": sum(map(bool, failed_cuts.values())),
            "total": len(failed_cuts and CONTROLS),
            "failed_cuts": failed_cuts,
        },
    }


def recorded(place: Path, setting: Setting) -> Sequence[Subject]:
    """Every scenario, recorded; RunError where the record lacks anything that the run did."""
    inputs, subjects = write_inputs(place / "inputs"), []
    for name, parts in PARTS.items():
        _say(f"recording {name} ...")
        recording = record(name, parts(inputs), setting)
        subject, world = subject_of(recording)
        if missed := unlike(world.files(), place / name / "recorded"):
            raise RunError(f"the record of {name} is not whole: {', '.join(missed[:5])}")
        _say(f"  {len(recording.operations)} operations in {len(recording.phases)} commands")
        subjects.append(subject)
    return subjects


def _say(line: str) -> None:
    print(line, flush=True)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.power", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add("--seed", type=int, default=0, help="every random choice follows from it (default 0)")
    add(
        "--cuts",
        type=int,
        default=10_000,
        help="moments at which the power fails (default 10000)",
    )
    add(
        "--resumes",
        type=int,
        default=20,
        help="of these, so many are really resumed to the end (default 20)",
    )
    add(
        "--controls",
        type=int,
        default=400,
        help="cuts without each kind of flush; 0 leaves them out (default 400)",
    )
    add("--json", type=Path, metavar="FILE", help="write the results as JSON")
    add("--dry-run", action="store_true", help="say what would be done, and start nothing")
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main())
    except YcoreError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
