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
    asked = parser.parse_args()
    if asked.dry_run:
        print(
            "Nothing was started.",
            *(f"{target.name}: {asked.rounds or target.rounds}" for target in targets()),
            sep="\n",
        )
        return 0
    found = 0
    for target in targets():
        if asked.only and target.name not in asked.only.split(","):
            continue
        outcome = attack(
            target, inputs(target, seed=asked.seed, rounds=asked.rounds or target.rounds)
        )
        found += len(outcome.defects)
        told = f"{outcome.tried} tried, {outcome.refused} refused, slowest {outcome.slowest_s:.2f} s"
        print(f"{target.name:15} {told}, {len(outcome.defects)} defects", flush=True)
        for what, data in outcome.defects.items():
            print(f"    {what}\n        {data[:300]!r}", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
