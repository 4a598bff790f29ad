"""One of two controllers over a real process group: `rank_of_two.py SCENARIO FOLDER`, with torchrun's environment.

A test tool. Its engine is no process: it writes the seed's last digit, as fast as it is told to. What the rank saw
goes to FOLDER/SCENARIO-RANK.json.
"""

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.rollout.talks import rules_alone
from tests.round.test_in_flight import MAX_TOKENS, TickingEngine
from tests.scoring.pools import pool_in
from ycore.config.schema import RewardConfig, RewardSettings, SamplingSettings
from ycore.engine import Engine
from ycore.errors import EngineError, YcoreError
from ycore.round.ahead import ControllerAhead
from ycore.round.in_flight import InFlight
from ycore.round.peers import Peers
from ycore.round.sampling import Curriculum, DrawSource, Rules, Shard
from ycore.round.step import Controller
from ycore.types import Completion, Group, Prompt

NUM_ROWS = 64


class ScriptedEngine(Engine):
    """Deterministic by (prompt, seed); `breaks_after` requests it fails, `hangs` it never answers."""

    name = "scripted"

    def __init__(
        self, *, wait_s: float = 0.0, breaks_after: int | None = None, hangs: bool = False
    ) -> None:
        self.num_asked = 0
        self.version = 0
        self._wait_s, self._breaks_after, self._hangs = wait_s, breaks_after, hangs

    async def wait_ready(self, *, timeout_s: float) -> None:
        pass

    async def logprobs_of(
        self, context_ids: Sequence[int], target_ids: Sequence[int]
    ) -> tuple[float, ...]:
        return tuple(-1.0 for _ in target_ids)

    async def load_weights(self, folder: Path, version: int) -> None:
        self.version = version

    async def close(self) -> None:
        pass

    async def complete(
        self, prompt_ids: Sequence[int], seed: int, *, greedy: bool = False
    ) -> Completion:
        self.num_asked += 1
        if self._hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(self._wait_s)
        if self._breaks_after is not None and self.num_asked > self._breaks_after:
            raise EngineError("scripted: gone")
        length = 1 + seed % 37
        return Completion(
            (seed % 10,) * length, (-1.0,) * length, str(seed % 10), "stop", self.version
        )


def make_rounds(
    peers: Peers,
    engine: Engine,
    folder: Path,
    *,
    make: Callable[..., Controller] = Controller,
    **settings: Any,
) -> Controller:
    """Start rounds whose rows all teach on rank 0, and on rank 1 one in four."""
    rows = [Prompt(n, f"ask {n}", {"flat": n % 2 == 1 and n % 8 != 1}) for n in range(NUM_ROWS)]
    rounds = make(
        engines=[engine],
        scoring=rules_alone(
            pool_in(
                folder / f"run-{peers.rank}",
                RewardConfig(reward=f"{folder}/their_rewards.py:digit"),
                settings=RewardSettings(workers=1, deadline_s=30),
            )
        ),
        draws=DrawSource(
            rows,
            seed=None,
            encode=lambda p: (p.row + 1,),
            max_prompt_tokens=5,
            shard=Shard(peers.rank, peers.world),
        ),
        rules=Rules(**{"group_size": 4, "seed": 5, "reward_weights": (1.0,), **settings}),
        peers=peers,
        share_weights=lambda version: folder,
    )
    rounds.start(timeout_s=30)
    return rounds


def summary_of(groups: Sequence[Group]) -> list[dict[str, Any]]:
    return [
        {"position": g.draw.position, "row": g.draw.prompt.row, "tokens": g.num_tokens}
        for g in groups
    ]


def a_round(peers: Peers, folder: Path, **settings: Any) -> dict[str, Any]:
    wait_s = (
        0.4 if peers.rank else 0.05
    )  # rank 0 is idle by the time that rank 1 finds its groups wanting
    rounds, metrics = make_rounds(peers, ScriptedEngine(wait_s=wait_s), folder, **settings), {}
    rounds.record = metrics.__setitem__
    try:
        groups = rounds.next_round(step=0, num_groups=4)
        state = json.loads(json.dumps(rounds.state()))
        again = make_rounds(peers, ScriptedEngine(), folder, **settings)
        again.restore(state)
        restored = again.state() == rounds.state()
        again.close()
    finally:
        rounds.close()
    return {
        "groups": summary_of(groups),
        "metrics": metrics,
        "drawn": state["draws"]["cursor"],
        "state": state,
        "restored": restored,
    }


def dynamic(peers: Peers, folder: Path) -> dict[str, Any]:
    return a_round(peers, folder, dynamic=True, max_tries=8)


def plain(peers: Peers, folder: Path) -> dict[str, Any]:
    return a_round(peers, folder)


def slow_and_fast(peers: Peers, folder: Path) -> dict[str, Any]:
    """Run engines of unequal speed that take one group at a time: what is not begun is whoever's is free."""
    rounds = make_rounds(
        peers, ScriptedEngine(wait_s=0.4 if peers.rank else 0.02), folder, max_in_flight=1
    )
    try:
        groups = rounds.next_round(step=0, num_groups=6)
    finally:
        rounds.close()
    return {"groups": summary_of(groups), "drawn": rounds.draws.cursor}


def exchange(peers: Peers, folder: Path) -> dict[str, Any]:
    """Exchange groups, summaries and sums with the other rank, and return them and the bytes sent."""
    rounds = make_rounds(peers, ScriptedEngine(), folder)
    try:
        first = rounds.next_round(step=0, num_groups=3)
        summaries = peers.gather_summaries([])
        sums = peers.add_up([peers.rank + 1.0, 10.0])
    finally:
        rounds.close()
    return {
        "groups": summary_of(first),
        "sent": peers.bytes_sent,
        "empty": len(summaries),
        "sums": sums,
    }


def curriculum(peers: Peers, folder: Path) -> dict[str, Any]:
    """Run three epochs of 64 rows, of which 24 are flat; from the second on, those come up less often."""
    rounds = make_rounds(peers, ScriptedEngine(), folder, dynamic=True, max_tries=8)
    rounds.draws.curriculum = Curriculum(seed=5, settings=SamplingSettings(drop_after=0))
    drawn, draw = [], rounds.draws.draw
    rounds.draws.draw = lambda: drawn.append(draw()) or drawn[-1]  # type: ignore[method-assign,func-returns-value]
    try:
        for step in range(20):
            rounds.next_round(step=step, num_groups=4)
    finally:
        rounds.close()
    state = json.loads(json.dumps(rounds.draws.curriculum.state_dict()))
    return {
        "state": state,
        "asked": [[drawn_row.position, drawn_row.prompt.row] for drawn_row in drawn],
    }


def ahead(peers: Peers, folder: Path) -> dict[str, Any]:
    """Run rounds one step ahead, while this thread adds up gradients with the other rank."""
    make = partial(ControllerAhead, num_steps=4, max_staleness=1)
    rounds = make_rounds(
        peers, ScriptedEngine(wait_s=0.02 * (1 + peers.rank)), folder, make=make, dynamic=True
    )
    seen, sums = [], []
    try:
        for step in range(4):
            groups = rounds.next_round(step=step, num_groups=4)
            seen.append(
                {
                    "groups": summary_of(groups),
                    "version": max(g.completions[0].policy_version for g in groups),
                }
            )
            for _ in range(50):
                gradient = torch.ones(1000) * (peers.rank + 1)
                dist.all_reduce(gradient)
                sums.append(float(gradient.mean()))
            rounds.settle()
            assert not rounds.should_stop()
    finally:
        rounds.close()
    return {"steps": seen, "sums": sums}


def carried(peers: Peers, folder: Path) -> dict[str, Any]:
    """Begin twice as many groups as are needed; what is not whole goes on in the next round."""
    make = partial(make_in_flight, Controller, max_age=9)
    rounds = make_rounds(
        peers,
        TickingEngine(tick_s=0.01),
        folder,
        make=make,
        dynamic=True,
        oversample=2.0,
        max_tries=8,
    )
    try:
        seen = [summary_of(rounds.next_round(step=step, num_groups=2)) for step in range(5)]
    finally:
        rounds.close()
    return {"steps": seen, **not_trained_on(rounds)}


def stream(peers: Peers, folder: Path) -> dict[str, Any]:
    """Weights come between two tokens, while this thread adds up gradients with the other rank."""
    make = partial(
        make_in_flight,
        partial(ControllerAhead, num_steps=12, max_staleness=3, max_surplus_age=3),
        max_age=3,
        streams=True,
    )
    engine = TickingEngine(tick_s=0.02 * (1 + peers.rank))
    rounds = make_rounds(peers, engine, folder, make=make, max_in_flight=3)
    seen, versions = [], []
    try:
        for step in range(12):
            groups = rounds.next_round(step=step, num_groups=2)
            seen.append(summary_of(groups))
            versions += [
                [step, list(completion.versions), list(completion.token_ids)]
                for group in groups
                for completion in group.completions
            ]
            for _ in range(20):
                dist.all_reduce(torch.ones(1000))
            assert not rounds.should_stop()
        rounds.rest()
        left = not_trained_on(rounds)
    finally:
        rounds.close()
    return {"steps": seen, "versions": versions, **left}


def make_in_flight(
    make: Callable[..., Controller], *, max_age: int, streams: bool = False, **parts: Any
) -> Controller:
    in_flight = InFlight(
        lambda ids: str(len(ids) % 10),
        max_tokens=MAX_TOKENS,
        max_age=max_age,
        seed=parts["rules"].seed,
        group_size=parts["rules"].group_size,
        streams=streams,
    )
    return make(in_flight=in_flight, **parts)


def not_trained_on(rounds: Controller) -> dict[str, Any]:
    assert rounds.in_flight is not None
    return {
        "left": [draw.position for draw in rounds.in_flight.unfinished],
        "kept": [item.group.draw.position for item in rounds.leftover_groups.waiting],
    }


def absent(peers: Peers, folder: Path) -> dict[str, Any]:
    """Rank 1 does not come to a collective in time."""
    if peers.rank:
        time.sleep(4)
        return {"message": None}
    peers._timeout_s = 1.0
    try:
        peers.add_up([1.0])
    except YcoreError as error:
        return {"message": str(error)}
    return {"message": "it came all the same"}


def stopped(peers: Peers, folder: Path) -> dict[str, Any]:
    """Rank 1 is asked to stop while both generate; rank 0 hears of it."""
    return stops(peers, ScriptedEngine(hangs=True), folder)


def stopped_while_waited_for(peers: Peers, folder: Path) -> dict[str, Any]:
    """Rank 1 is asked to stop when rank 0 has all its groups and waits."""
    return stops(peers, ScriptedEngine(hangs=peers.rank == 1), folder)


def stops(peers: Peers, engine: ScriptedEngine, folder: Path) -> dict[str, Any]:
    rounds = make_rounds(peers, engine, folder)
    try:
        if peers.rank == 1:
            threading.Timer(0.5, rounds.stop.set).start()
        return outcome(rounds)
    finally:
        rounds.close()


def outcome(rounds: Controller) -> dict[str, Any]:
    began = time.monotonic()
    try:
        rounds.next_round(step=0, num_groups=4)
    except YcoreError as error:
        return {
            "error": type(error).__name__,
            "message": str(error),
            "after_s": time.monotonic() - began,
        }
    return {"error": None}


def main() -> None:
    names, folder = sys.argv[1].split(","), Path(sys.argv[2])
    dist.init_process_group("gloo")
    peers = Peers()
    for name in names:
        seen = globals()[name](peers, folder)
        (folder / f"{name}-{peers.rank}.json").write_text(json.dumps(seen))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
