"""How even the ranks' tokens are before and after groups are dealt, for long-tailed lengths. Takes a few seconds.

    python docs/benchmarks/balance.py

A completion has lognormal(5, 1) tokens, at most 4096 (median 148, mean about 240); a group has eight completions.
`coordination` measures what a deal costs to send.
"""

import argparse
import random
from dataclasses import dataclass
from statistics import mean

from ycore.round.peers import Deal, GroupSummary, deal_groups, imbalance

GROUP_SIZE = 8


@dataclass(frozen=True, slots=True)
class Dealt:
    """One seed's table: imbalance before and after, and the share of groups that changed ranks."""

    before: float
    after: float
    moved: float


def deal_once(seed: int, *, world: int, per_rank: int) -> Dealt:
    dice = random.Random(seed)
    summaries = [
        GroupSummary(n % world, n // world, n, _group(dice), True)
        for n in range(world * per_rank)
    ]
    deal = deal_groups(summaries, world=world, per_rank=per_rank)
    before = [
        sum(summary.cost for summary in summaries if summary.rank == rank)
        for rank in range(world)
    ]
    return Dealt(imbalance(before), imbalance(_loads(deal)), len(deal.moves) / len(summaries))


def _group(dice: random.Random) -> int:
    return sum(min(4096, 1 + int(dice.lognormvariate(5, 1))) for _ in range(GROUP_SIZE))


def _loads(deal: Deal) -> list[int]:
    return [sum(summary.cost for summary in rank_groups) for rank_groups in deal.chosen]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--per-rank", type=int, nargs="+", default=[4, 8, 16])
    arguments = parser.parse_args()
    print(
        "| ranks | groups a rank | before, mean | before, worst | after, mean | after, worst | groups moved |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for world in arguments.world:
        for per_rank in arguments.per_rank:
            deals = [
                deal_once(seed, world=world, per_rank=per_rank)
                for seed in range(arguments.seeds)
            ]
            before, after = [deal.before for deal in deals], [deal.after for deal in deals]
            figures = f"{mean(before):.3f} | {max(before):.3f} | {mean(after):.3f} | **{max(after):.3f}**"
            print(
                f"| {world} | {per_rank} | {figures} | {mean(deal.moved for deal in deals):.0%} |"
            )


if __name__ == "__main__":
    main()
