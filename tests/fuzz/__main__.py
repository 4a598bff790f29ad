"""`python -m tests.fuzz --rounds 20000`: as the tests do, for longer. Exit status 1 where a defect was found."""

import argparse
import sys

from tests.fuzz.harness import attack, inputs
from tests.fuzz.targets import targets


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Feed hostile input to every reader."
    )
    parser.add_argument(
        "--rounds", type=int, help="mutations a target; by default as many as the tests try"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="targets, with commas between them")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be tried")
    options = parser.parse_args()
    if options.dry_run:
        print(
            "Nothing was started.",
            *(f"{target.name}: {options.rounds or target.rounds}" for target in targets()),
            sep="\n",
        )
        return 0
    num_defects = 0
    for target in targets():
        if options.only and target.name not in options.only.split(","):
            continue
        outcome = attack(
            target, inputs(target, seed=options.seed, rounds=options.rounds or target.rounds)
        )
        num_defects += len(outcome.defects)
        counts = f"{outcome.tried} tried, {outcome.refused} refused, slowest {outcome.slowest_s:.2f} s"
        print(f"{target.name:15} {counts}, {len(outcome.defects)} defects", flush=True)
        for defect, data in outcome.defects.items():
            print(f"    {defect}\n        {data[:300]!r}", flush=True)
    return 1 if num_defects else 0


if __name__ == "__main__":
    sys.exit(main())
