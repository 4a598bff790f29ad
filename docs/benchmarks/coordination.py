"""Measure what coordination costs as controllers are added: N parallel controllers against one central controller.

    python docs/benchmarks/coordination.py --output runs/coordination

These parts are real: the controllers (their counts, meetings, turns on slots, the deal, the exchange of groups), their
processes, the allocator's process, the process group, the unix sockets, the client of the engines, and a megabyte of
prompt in every request.
The engines are stubs: processes that read a whole request and return a made-up completion at once. The rewards are
made up in the controller. So the benchmark measures data transfer and decisions, without generation.

The parallel way has N controllers that share N engines. The central way does the same work with one controller and N
engines, which has N times the groups. The allocator's processor seconds are shared out to the controllers. Wall time
means nothing with more processes than cores, so the benchmark counts processor seconds and bytes for each process.
Needs `fork`.
"""

import argparse
import json
import multiprocessing
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from coordination_engine import serve
from coordination_report import as_markdown, draw
from machine import describe_machine

from ycore.engine import SamplingParams
from ycore.engine.vllm_engine import VllmEngine
from ycore.placement.placement import DYNAMIC, SlotPool
from ycore.placement.service import RemoteAllocator
from ycore.placement.slots import Slots
from ycore.round.peers import Peers
from ycore.round.sampling import DrawSource, Rules, Shard
from ycore.round.step import Controller
from ycore.scoring.scoring import RewardPool, RuleScorer, Scoring
from ycore.types import Prompt, Score

Job = dict[str, Any]
FORK = multiprocessing.get_context("fork")  # torch is imported once, and shared


class MadeUpRewards(RewardPool):
    """Scores that differ within a group, made up on the spot."""

    def __init__(self) -> None:
        pass

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def score(
        self, source: int, offered: Mapping[str, Sequence[Any]], *, step: int
    ) -> list[Score]:
        return [Score(float(index)) for index in range(len(offered["prompts"]))]


def control(rank: int, world: int, engines: Sequence[Path], job: Job, answer: Path) -> None:
    """Run one controller, from its first round to its last; write its processor seconds and bytes to `answer`."""
    pool, remote = SlotPool(len(engines)), None
    if world > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{job['meeting']}", rank=rank, world_size=world
        )
        remote = RemoteAllocator(
            Path(job["allocator"]), pool, DYNAMIC, rank=rank, num_ranks=world
        )
    peers = Peers()
    payload = tuple(
        random.Random(rank).randrange(10_000, 100_000) for _ in range(job["payload_bytes"] // 6)
    )
    sampling = SamplingParams(max_tokens=64)
    rounds = Controller(
        engines=[
            VllmEngine(path.name, path, sampling, request_timeout_s=600) for path in engines
        ],
        scoring=Scoring([RuleScorer(MadeUpRewards(), 0)]),
        draws=DrawSource(
            [Prompt(row, "") for row in range(64)],
            seed=0,
            encode=lambda prompt: payload,
            max_prompt_tokens=len(payload),
            shard=Shard(rank, world),
        ),
        rules=Rules(
            group_size=job["group_size"],
            seed=0,
            reward_weights=(1.0,),
            dynamic=True,
            max_in_flight=2,
        ),
        peers=peers,
        share_weights=None,
        slots=Slots(len(engines), allocator=remote, rank=rank),
    )
    rounds.start(timeout_s=120)
    groups = job["groups"] * (len(engines) if world == 1 else 1)
    rounds.next_round(step=0, num_groups=groups)  # warms up: connections, buffers
    before, moved, allocator = _used(), peers.bytes_sent, _used_by(job.get("allocator_pid"))
    began = time.perf_counter()
    for step in range(1, job["rounds"] + 1):
        rounds.next_round(step=step, num_groups=groups)
    allocator = _used_by(job.get("allocator_pid")) - allocator
    usage = {
        "cpu_s": _used() - before,
        "allocator_cpu_s": allocator,
        "wall_s": time.perf_counter() - began,
        "peer_bytes": peers.bytes_sent - moved,
    }
    answer.write_text(json.dumps(usage))
    rounds.close()
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def _used() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _used_by(pid: int | None) -> float:
    return 0.0 if pid is None else sum(psutil.Process(pid).cpu_times()[:2])


def measure(world: int, num_engines: int, job: Job) -> dict[str, Any]:
    """Run `world` controllers over `num_engines` engines, in processes of their own; leave nothing of them."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        job = job | {"meeting": str(folder / "meeting"), "allocator": str(folder / "allocator")}
        service = None
        if world > 1:
            service = subprocess.Popen(
                [sys.executable, "-m", "ycore.placement.service", job["allocator"], str(world)]
            )
            job["allocator_pid"] = service.pid
        sockets = [folder / f"engine-{number}" for number in range(num_engines)]
        answers = [folder / f"controller-{rank}.json" for rank in range(world)]
        engines = [_start(serve, path, job["rounds"]) for path in sockets]
        controllers = [
            _start(control, rank, world, sockets, job, answer)
            for rank, answer in enumerate(answers)
        ]
        try:
            for process in controllers:
                process.join(job["timeout_s"])
                if process.exitcode != 0:
                    raise RuntimeError(f"a controller of {world} ended with {process.exitcode}")
            usages = [json.loads(answer.read_text()) for answer in answers]
        finally:
            for process in (*controllers, *engines):
                process.kill()
                process.join()
            if service is not None:
                service.kill()
                service.wait()
    # Every request carries the payload; every controller makes group_size requests a group.
    through_engines = (
        job["rounds"]
        * job["groups"]
        * num_engines
        // world
        * job["group_size"]
        * job["payload_bytes"]
    )
    allocator_cpu_s = usages[0]["allocator_cpu_s"]
    return {
        "controllers": world,
        "engines": num_engines,
        "cpu_s_mean": (sum(usage["cpu_s"] for usage in usages) + allocator_cpu_s) / world,
        "allocator_cpu_s": allocator_cpu_s,
        "cpu_s_busiest": max(usage["cpu_s"] for usage in usages) + allocator_cpu_s / world,
        "bytes_busiest": through_engines + max(usage["peer_bytes"] for usage in usages),
        "wall_s": max(usage["wall_s"] for usage in usages),
    }


def _start(work: Callable[..., None], *arguments: Any) -> Any:
    process = FORK.Process(target=work, args=arguments, daemon=True)
    process.start()
    return process


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--controllers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--groups", type=int, default=4, help="groups a controller and round")
    parser.add_argument("--group-size", type=int, default=2)
    parser.add_argument(
        "--rounds", type=int, default=2, help="counted rounds, after one that warms up"
    )
    parser.add_argument(
        "--payload-mb",
        type=float,
        default=1.0,
        help="megabytes of a prompt, as the engine gets it",
    )
    parser.add_argument(
        "--timeout", type=float, default=900.0, help="seconds for one row of the table"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/coordination"))
    arguments = parser.parse_args()
    job: Job = {
        "groups": arguments.groups,
        "group_size": arguments.group_size,
        "rounds": arguments.rounds,
    }
    job |= {"payload_bytes": int(arguments.payload_mb * 1e6), "timeout_s": arguments.timeout}
    arguments.output.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "job": job,
        "machine": describe_machine(),
        "parallel": [],
        "central": [],
    }
    for number in arguments.controllers:
        results["parallel"].append(measure(number, number, job))
        results["central"].append(measure(1, number, job))
        (arguments.output / "results.json").write_text(json.dumps(results, indent=2))
    print(as_markdown(results))
    draw(results, arguments.output / "coordination.png")


if __name__ == "__main__":
    main()
