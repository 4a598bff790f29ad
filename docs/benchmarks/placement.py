"""Placement with real engines: colocated, split:1:1 and dynamic in turn, on two slots, doing the same work.

    python docs/benchmarks/placement.py --output runs/placement
    python docs/benchmarks/placement.py --asleep --output runs/placement-asleep

Two slots are two cores. Each has a rollout engine and a judge's engine: four vLLM servers with the same small model.
They are driven by the controllers, slots and allocator of a live run: a process for each of --ranks ranks, a process
group, and the allocator's process. Nothing is trained, and no weights are sent.

The work is the same for every placement. The length of a completion follows from its seed alone (long-tailed, up to
--longest tokens, end of text ignored). A judge reads it and writes --judge-tokens tokens. Whether a group can teach is
a random function of its position. Groups that cannot teach are replaced one for one, and ranks draw from one list, not
each from its own as in a run. So every placement draws the same prompts in the end.

Engines stay up, as on a CPU: a swap only changes which engine gets requests. With --asleep one engine of a slot is
awake at a time, as on a GPU. A CPU has no sleep, so this is emulated: vLLM's own `/sleep` and `/wake_up`, which stop
and restart serving here but move no memory, and around them a wait of the length that was published for a model of 0.6B
on a GPU (vllm-project/vllm#48337: 1.44 s for both at level 1, 1.92 s at level 2).

Before, between and after the rounds, the speeds of the engines are measured alone (`placement_speeds`). At the end the
simulator gets these speeds and the lengths, and the table compares its seconds with the real ones. It also compares
what the simulator predicts for all three placements from the recorded rounds of each, as `simulate.py --trace` does.
"""

import argparse
import asyncio
import json
import math
import multiprocessing
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lanes import draw_panels
from machine import busy_share, describe_machine
from placement_engines import (
    PUBLISHED_S,
    Engines,
    SeededEngine,
    clients,
    engines_running,
    sleepers,
)
from placement_speeds import Measured, mean_of, measure
from simulator.comparison import Scenario, compare_recorded, simulate
from simulator.recording import read_trace, requests_of
from simulator.simulation import Demand, Machine, SimulatedGroup

from ycore.placement.allocator import Allocator
from ycore.placement.placement import JUDGE, ROLLOUT, SlotPool, parse_placement
from ycore.placement.service import RemoteAllocator, home_rank
from ycore.placement.slots import Slots
from ycore.rollout.turns import completion_seed
from ycore.round.peers import Peers
from ycore.round.sampling import AcceptanceRate, DrawSource, Rules
from ycore.round.step import Controller
from ycore.run.tasks import together
from ycore.run.trace import ROUND, TraceWriter
from ycore.scoring.scoring import PendingGroup, Scoring
from ycore.types import Draw, Prompt, Score

PLACEMENTS = ("colocated", "split:1:1", "dynamic")
APART = 1000
"""Positions between the first prompts of two rounds."""

_BETWEEN = 5
"""Counted rounds between two measurements of the engines' speeds."""

ROLES = (ROLLOUT, JUDGE)
FORK = multiprocessing.get_context("fork")  # torch is imported once


class OneForOne(AcceptanceRate):
    """Draws exactly what is missing, so that the prompts drawn do not depend on which ended first."""

    @property
    def rate(self) -> float:
        return 1.0

    def observe(self, *, taught: bool) -> None:
        """Nothing is learned."""


def length_of(seed: int, job: argparse.Namespace) -> int:
    """Draw the tokens of the completion with this seed: lognormal with the asked mean, cut off at the longest."""
    drawn = random.Random(seed).lognormvariate(math.log(job.mean) - job.sigma**2 / 2, job.sigma)
    return max(4, min(job.longest, round(drawn)))


def teaches(position: int, job: argparse.Namespace) -> bool:
    return random.Random(f"teach {position}").random() < job.teach_share


class LengthJudge:
    """A scorer whose verdict is made up, and whose work is real: it reads the completion and writes so many tokens."""

    def __init__(self, engines: Sequence[SeededEngine], job: argparse.Namespace) -> None:
        self._engines = engines
        self._job = job

    async def start(self, *, timeout_s: float) -> None:
        """The engines are up."""

    async def close(self) -> None:
        """They are the script's."""

    async def score(self, writing: PendingGroup) -> list[Score]:
        return await together([self._judge(writing, index) for index in range(len(writing))])

    async def _judge(self, writing: PendingGroup, index: int) -> Score:
        completion = await writing.tasks_G[index]
        async with writing.turn(JUDGE) as slot:
            # What it reads is as long for every completion, so that a request has one size.
            judge_prompt = (completion.token_ids * self._job.judge_reads)[
                : self._job.judge_reads
            ]
            verdict = await self._engines[slot].complete(judge_prompt, self._job.judge_tokens)
            slot.num_tokens = len(verdict.token_ids)
        position = writing.draw.position
        return Score(float(index % 2) if teaches(position, self._job) else 0.0)


class OneList(DrawSource):
    """Prompts of a round in one order for all ranks; `drawn` counts them, by round, and is shared by the ranks."""

    def __init__(self, drawn: Any, job: argparse.Namespace) -> None:
        super().__init__(
            [Prompt(row, "") for row in range(64)],
            seed=None,
            encode=lambda prompt: tuple(
                1000 + (7 * prompt.row + place) % 9000 for place in range(job.prompt_tokens)
            ),
            max_prompt_tokens=job.prompt_tokens,
        )
        self._drawn = drawn
        self.round = 0

    def draw(self) -> Draw:
        with self._drawn.get_lock():
            self.cursor = self.round * APART + self._drawn[self.round]
            self._drawn[self.round] += 1
        return super().draw()


def pool_of(job: argparse.Namespace) -> SlotPool:
    swap_s = statistics.fmean(PUBLISHED_S.values()) if job.asleep else 0.0
    return SlotPool(
        2, ROLES, dict.fromkeys(ROLES, job.max_num_seqs), exclusive=job.asleep, swap_s=swap_s
    )


def counters(job: argparse.Namespace) -> dict[str, Any]:
    return {words: FORK.Array("i", job.warm_up + job.rounds) for words in PLACEMENTS}


class Contestant:
    """One placement, as one of its ranks has it: its own slots, and what their allocator learned of them."""

    def __init__(
        self,
        words: str,
        engines: Engines,
        job: argparse.Namespace,
        folder: Path,
        drawn: Any,
        *,
        remote: RemoteAllocator | None = None,
    ) -> None:
        """Args:
        remote: the allocator of several ranks.
        """
        self.words = words
        self.trace = folder / f"{words.replace(':', '-')}.json"
        self._need = job.need // job.ranks
        allocator = Allocator(pool_of(job), parse_placement(words)) if remote is None else None
        rank, num_ranks = (0, 1) if remote is None else (remote.rank, remote.num_ranks)
        self.leads = rank == 0
        self.peers = Peers()
        home_slots = {slot for slot in range(2) if home_rank(slot, num_ranks) == rank}
        engines_asleep = sleepers(engines, home_slots) if job.asleep else None
        trace = TraceWriter(self.trace)
        self.slots = Slots(
            2,
            allocator=remote or allocator,
            sleepers=engines_asleep,
            trace=trace,
            rank=rank,
        )
        rules = Rules(group_size=job.group_size, seed=0, reward_weights=(1.0,), dynamic=True)
        self._draws = OneList(drawn, job)
        self._controller = Controller(
            engines=engines.rollouts,
            scoring=Scoring([LengthJudge(engines.judges, job)]),
            draws=self._draws,
            rules=rules,
            peers=self.peers,
            slots=self.slots,
        )
        self._controller.acceptance = OneForOne()

    async def write(self, number: int) -> dict[str, Any]:
        """Write one round; where engines sleep, their waking before it and falling asleep after it count too."""
        self._draws.round = number
        self._controller.meter.begin()
        learned = self.slots.state or {"division": {}, "mode": "first"}
        await self.peers.meet(stopping=False)
        began = time.perf_counter()
        async with self.slots.round():
            finished = await self._controller.fill(need=self._need, ready=0, step=number)
        seconds = time.perf_counter() - began
        metrics = await self.slots.end_round(self.peers.add_up, step=number)
        drawn, tokens = self.peers.add_up(
            [self._controller.meter.drawn, sum(item.group.num_tokens for item in finished)]
        )
        row = {"seconds": seconds, "drawn": drawn, "tokens": tokens}
        row |= {"division": dict(learned["division"]), "mode": learned["mode"]}
        return row | {name.removeprefix("ycore/"): value for name, value in metrics.items()}


def simulated_group(position: int, job: argparse.Namespace) -> SimulatedGroup:
    lengths = [
        length_of(completion_seed(0, position, index), job) for index in range(job.group_size)
    ]
    return SimulatedGroup(
        tuple({ROLLOUT: float(length), JUDGE: float(job.judge_tokens)} for length in lengths),
        teaches(position, job),
    )


def predict(
    words: str, measured: Sequence[dict[str, Measured]], job: argparse.Namespace
) -> list[float]:
    """Simulate the counted rounds of a placement; return their seconds."""
    mean = {role: mean_of([by_role[role] for by_role in measured]) for role in ROLES}
    result = simulate(
        parse_placement(words),
        pool_of(job),
        Machine(
            {role: measurement.speed for role, measurement in mean.items()},
            PUBLISHED_S if job.asleep else {},
            {role: measurement.reading_s for role, measurement in mean.items()},
        ),
        lambda number: lambda position: simulated_group(position, job),
        Demand(job.need, dynamic=True),
        num_rounds=job.rounds,
        warm_up=job.warm_up,
        position_of=lambda number: number * APART,
        yields=OneForOne(),
    )
    return [outcome.seconds for outcome in result.rounds]


def replay(trace: Path, job: argparse.Namespace) -> dict[str, float]:
    """Simulate every placement from the counted rounds of a recording; return their mean seconds."""
    scenario = Scenario(
        num_slots=2,
        swap_s=pool_of(job).swap_s,
        num_rounds=job.rounds,
        warm_up=job.warm_up,
        group_size=job.group_size,
        need=job.need,
        dynamic=True,
        max_tries=4,
        max_tokens=job.longest,
        mean_tokens=job.mean,
        judge_work=1.0,
        step_s=(0.0, 0.0),
        seed=0,
    )
    rounds = requests_of([span for span in read_trace(trace) if span.rank == 0])[-job.rounds :]
    seconds = {
        str(result.placement): result.seconds
        for result in compare_recorded(rounds, scenario).results
    }
    return {words: seconds[words] for words in PLACEMENTS}


async def measure_both(engines: Engines, job: argparse.Namespace) -> dict[str, Measured]:
    measured = {}
    for role, of_role, reads in (
        (ROLLOUT, engines.rollouts, job.prompt_tokens),
        (JUDGE, engines.judges, job.judge_reads),
    ):
        asleep = sleepers(engines, {0, 1})[role].values() if job.asleep else ()
        for engine in asleep:
            await engine.wake()
        measured[role] = await measure(of_role, reads)
        for engine in asleep:
            await engine.sleep()
    print(measured, flush=True)
    return measured


async def play_all(
    contestants: Sequence[Contestant], engines: Engines, job: argparse.Namespace
) -> tuple[dict[str, list[dict[str, Any]]], list[dict[str, Measured]]]:
    """Play round by round every placement in turn, another one first each time; the first rounds only warm up."""
    rows: dict[str, list[dict[str, Any]]] = {contestant.words: [] for contestant in contestants}
    measured = []
    leads = contestants[0].leads
    for contestant in contestants:
        await contestant.slots.open(timeout_s=120)
    await contestants[0].slots.sleep()
    for number in range(job.warm_up + job.rounds):
        if leads and number >= job.warm_up and (number - job.warm_up) % _BETWEEN == 0:
            measured.append(await measure_both(engines, job))
        first = number % len(contestants)
        for contestant in [*contestants[first:], *contestants[:first]]:
            row = await contestant.write(number)
            if not leads:
                continue
            summary = f"{row['seconds']:6.1f} s, {row['drawn']:.0f} groups, {row['mode']}, {row['swaps']:.0f} swaps"
            print(f"round {number} {contestant.words:10} {summary}", flush=True)
            if number >= job.warm_up:
                rows[contestant.words].append(row)
    if leads:
        measured.append(await measure_both(engines, job))
    for contestant in contestants:
        await contestant.peers.meet(stopping=False)
        contestant.slots.close()
    return rows, measured


def run_rank(
    rank: int, folder: Path, drawn: Mapping[str, Any], job: argparse.Namespace
) -> None:
    """Run a rank: all placements in turn. The first rank writes its results to `folder`."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=job.ranks
    )
    engines = clients(folder / "sockets", length_of=lambda seed: length_of(seed, job))
    contestants = [
        Contestant(
            words,
            engines,
            job,
            job.output,
            drawn[words],
            remote=remote_of(number, rank, folder, job),
        )
        for number, words in enumerate(PLACEMENTS)
    ]
    rows, measured = asyncio.run(play_all(contestants, engines, job))
    if rank == 0:
        summarised = summary_of(rows, measured, contestants, job)
        results = {
            "measured": [
                {role: measurement.as_json() for role, measurement in by_role.items()}
                for by_role in measured
            ],
            "rounds": rows,
        }
        (folder / "told.json").write_text(json.dumps({**results, "summary": summarised}))
    dist.destroy_process_group()


def remote_of(number: int, rank: int, folder: Path, job: argparse.Namespace) -> RemoteAllocator:
    placement = parse_placement(PLACEMENTS[number])
    return RemoteAllocator(
        folder / f"allocator-{number}", pool_of(job), placement, rank=rank, num_ranks=job.ranks
    )


def play_ranks(sockets: Path, job: argparse.Namespace) -> dict[str, Any]:
    """Run all ranks and an allocator for each placement, in processes of their own; leave nothing of them."""
    with tempfile.TemporaryDirectory(prefix="yc-") as place:
        folder = Path(place)
        (folder / "sockets").symlink_to(sockets)
        words = [sys.executable, "-m", "ycore.placement.service"]
        services = [
            subprocess.Popen([*words, str(folder / f"allocator-{number}"), str(job.ranks)])
            for number in range(len(PLACEMENTS))
        ]
        drawn = counters(job)
        ranks = [
            FORK.Process(target=run_rank, args=(rank, folder, drawn, job))
            for rank in range(job.ranks)
        ]
        try:
            for process in ranks:
                process.start()
            while any(process.is_alive() for process in ranks):
                if any(process.exitcode for process in ranks):
                    raise RuntimeError("a rank failed")
                time.sleep(0.5)
            if any(process.exitcode for process in ranks):
                raise RuntimeError("a rank failed")
            results: dict[str, Any] = json.loads((folder / "told.json").read_text())
            return results
        finally:
            for process in ranks:
                process.kill()
            for service in services:
                service.kill()
                service.wait()


def summary_of(
    rows: dict[str, list[dict[str, Any]]],
    measured: Sequence[dict[str, Measured]],
    contestants: Sequence[Contestant],
    job: argparse.Namespace,
) -> dict[str, Any]:
    predicted = {words: predict(words, measured, job) for words in PLACEMENTS}
    return summarise(
        rows,
        predicted,
        {contestant.words: replay(contestant.trace, job) for contestant in contestants},
    )


def summarise(
    rows: dict[str, list[dict[str, Any]]],
    predicted: dict[str, list[float]],
    replayed: dict[str, dict[str, float]],
) -> dict[str, Any]:
    """Return the figures that the page quotes."""
    mean = {
        words: statistics.fmean(row["seconds"] for row in placement_rows)
        for words, placement_rows in rows.items()
    }
    better = min(value for words, value in mean.items() if words != "dynamic")
    same = all(
        len({row[key] for row in turn}) == 1
        for turn in zip(*rows.values(), strict=True)
        for key in ("drawn", "tokens")
    )
    return {
        "seconds": mean,
        "range": {
            words: [
                min(r["seconds"] for r in placement_rows),
                max(r["seconds"] for r in placement_rows),
            ]
            for words, placement_rows in rows.items()
        },
        "bound_ratio": {
            words: statistics.fmean(row["bound_ratio"] for row in placement_rows)
            for words, placement_rows in rows.items()
        },
        "idle_share": {
            words: statistics.fmean(row["idle_share"] for row in placement_rows)
            for words, placement_rows in rows.items()
        },
        "simulated": {words: statistics.fmean(seconds) for words, seconds in predicted.items()},
        "simulated_over_real": {
            words: statistics.fmean(predicted[words]) / mean[words] for words in rows
        },
        "replayed_over_real": {
            recorded: {
                words: seconds / mean[words] for words, seconds in seconds_by_placement.items()
            }
            for recorded, seconds_by_placement in replayed.items()
        },
        "dynamic_over_better": mean["dynamic"] / better,
        "same_work": same,
    }


def main() -> None:
    job = parse_arguments()
    signal.signal(signal.SIGTERM, _end)
    job.output.mkdir(parents=True, exist_ok=True)
    busy = busy_share()
    with ExitStack() as stack:
        sockets = stack.enter_context(engines_running(job, job.output))
        played = play_ranks(sockets, job)
    settings = {
        "job": {key: str(value) for key, value in vars(job).items()},
        "machine": describe_machine(),
        "busy": busy,
    }
    (job.output / "results.json").write_text(json.dumps(settings | played, indent=2))
    print(json.dumps(played["summary"], indent=2))
    traces = [(words, job.output / f"{words.replace(':', '-')}.json") for words in PLACEMENTS]
    draw_panels(
        [(words, _last_round(trace)) for words, trace in traces], job.output / "timeline.png"
    )


def _end(*_: object) -> None:
    """End the engines too, and once."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def _last_round(trace: Path) -> list[Any]:
    spans = read_trace(trace)
    last = [span for span in spans if span.name == ROUND][-1]
    return [span for span in spans if span.name != ROUND and span.began >= last.began]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--rounds", type=int, default=10, help="counted rounds of each placement"
    )
    parser.add_argument(
        "--warm-up", type=int, default=2, help="rounds before them, in which dynamic learns"
    )
    parser.add_argument(
        "--ranks", type=int, default=2, help="training ranks that share the two slots"
    )
    parser.add_argument(
        "--asleep",
        action="store_true",
        help="one engine of a slot is awake at a time (emulated)",
    )
    parser.add_argument("--need", type=int, default=32, help="groups that can teach, a round")
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--teach-share", type=float, default=0.7)
    parser.add_argument("--mean", type=float, default=64.0, help="tokens of a completion")
    parser.add_argument(
        "--sigma",
        type=float,
        default=0.8,
        help="spread of the logarithm of a completion's length",
    )
    parser.add_argument("--longest", type=int, default=384)
    parser.add_argument("--prompt-tokens", type=int, default=24)
    parser.add_argument(
        "--judge-reads",
        type=int,
        default=32,
        help="tokens that the judge reads for a completion",
    )
    parser.add_argument(
        "--judge-tokens", type=int, default=1, help="tokens that it writes; 1 is a label's"
    )
    parser.add_argument(
        "--max-num-seqs", type=int, default=256, help="requests that an engine holds at once"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/placement"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
