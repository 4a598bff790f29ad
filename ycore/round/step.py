"""One training step, up to where TRL takes over: the algorithm on one screen.

    sync -> draw -> generate -> score -> keep or replace -> deal -> commit -> TRL

Every training rank runs this for its own shard of the prompts. While a round runs the ranks exchange counts only; when
it is dealt, a few whole groups change ranks so that training costs every rank about the same.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from ycore.placement.placement import ROLLOUT
from ycore.rollout.turns import GroupStart
from ycore.round.curriculum import lesson_of
from ycore.round.journal import Committed
from ycore.round.loop import RankLoop
from ycore.round.peers import Offer, deal_groups
from ycore.round.sampling import Quota
from ycore.run.tasks import ending, next_finished, together
from ycore.run.trace import ROUND, SYNC
from ycore.scoring.group_rewards import can_teach, compared_rewards
from ycore.scoring.scoring import PendingGroup
from ycore.types import Completion, Draw, Finished, Group, Prompt


class Controller(RankLoop):
    """The loop on one training rank; TRL's trainer calls `next_round` whenever it needs groups to learn from.

    Example: `controller.start(timeout_s=300); groups = controller.next_round(step=0, num_groups=4); controller.close()`
    """

    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        """Scored groups for this rank, committed to the journal. Every rank calls this at the same step.

        Args:
            step: optimizer steps taken so far, which is also the version of the policy that writes.
            num_groups: groups that each rank trains on.

        Raises:
            Interrupted: this rank or another was asked to stop.
            YcoreError: an engine, a scorer or another rank failed.
        """
        committed = self.committed(step, num_groups)
        if (
            committed is not None
        ):  # the run was killed after the commit: train on the very same completions
            return self.take_again(committed)
        with self.phase(SYNC):
            self.sync_for_round(step)
        return self.hand_over(self.make_round(step=step, num_groups=num_groups, version=step))

    def make_round(self, *, step: int, num_groups: int, version: int) -> Committed:
        """Have the engines, which hold this version, write the round of a step, and commit it."""
        with self.phase(ROUND):
            ready = self.surplus.take(version)
            written = self.run_round(
                self.fill(need=num_groups, ready=len(ready), step=step), step=step
            )
            if self.carrier is not None:
                self.carrier.end_round(version)
            groups = self.deal([*ready, *written], num_groups)
        return self.commit(step, groups)

    async def fill(self, *, need: int, ready: int, step: int) -> list[Finished]:
        """Draw prompts until all ranks together have enough groups that can teach (dynamic sampling).

        Args:
            need: groups that each rank trains on.
            ready: groups that this rank has from an earlier round, each of which can teach.

        Returns:
            The groups that this rank finished, in the order of their draws.
        """
        quota = await Quota.open(self.rules, self.yields, self.peers, need=need, ready=ready)
        writing: list[asyncio.Task[Finished]] = []  # in the order of their draws
        finished: list[Finished] = []
        left, self._is_over = [] if self.carrier is None else self.carrier.unfinished, False
        async with ending(writing):
            while (num_new := await quota.claim(num_writing=len(writing))) is not None:
                for draw in self.next_draws(num_new, left):
                    writing.append(asyncio.create_task(self.group(draw, step=step)))
                # In order, what is drawn next follows from the groups drawn before, and not from which ends first.
                awaited = writing[:1] if self.rules.in_order else writing
                done = await next_finished(awaited, quota.news(num_writing=len(writing)))
                writing[:] = [task for task in writing if task not in done]
                for task in done:
                    await quota.finish(task.result())
                    finished.append(task.result())
            if writing:  # there are groups enough without them
                await self.halt()
                finished += [task.result() for task in writing if task.done()]
        return sorted(finished, key=lambda item: item.group.draw.position)

    async def group(self, draw: Draw, *, step: int) -> Finished:
        """Generate and score every completion of one prompt; scorers start as soon as a completion is written."""
        rules, start = self.rules, await self.writer.start(draw)
        draw = start.draw
        sampled = [
            asyncio.create_task(self.complete(start, index)) for index in range(rules.group_size)
        ]
        greedy = []
        if rules.greedy_baseline:
            greedy.append(asyncio.create_task(self.complete(start, rules.group_size, greedy=True)))
        async with ending([*sampled, *greedy]):
            parts = [
                PendingGroup(draw, tasks, step, self.slots) for tasks in (sampled, greedy) if tasks
            ]
            scores_GR, *baseline = await together([self.scoring.score(part) for part in parts])
            completions_G = await asyncio.gather(*sampled)
        group = Group(
            draw,
            tuple(completions_G),
            tuple(tuple(scores_R) for scores_R in scores_GR),
            greedy_scores_R=tuple(baseline[0][0]) if baseline else None,
        )
        self.count(group)
        if self.carrier is not None:
            self.carrier.finish_group(draw)
        weights, constraints = rules.reward_weights, rules.constraints
        teaches = can_teach(
            group,
            weights,
            alone=rules.teaches_alone,
            min_stds_R=rules.min_stds_R,
            constraints=constraints,
            normalizes_each=rules.normalizes_each,
        )
        return Finished(group, teaches, lesson_of(compared_rewards(group, weights, constraints)))

    async def complete(self, start: GroupStart, index: int, *, greedy: bool = False) -> Completion:
        """One completion. Each of the policy's turns is one request, whose seed does not depend on who answers it."""
        write = partial(self.write, greedy=greedy, prompt=start.draw.prompt)
        completion = await self.writer.write(start, index, write, seed=self.rules.seed)
        self.meter.note_written()
        return completion

    async def write(
        self,
        token_ids: Sequence[int],
        seed: int,
        *,
        greedy: bool,
        prompt: Prompt,
        max_tokens: int | None = None,
    ) -> Completion:
        """What the policy writes after these tokens, by the engine of the slot whose turn it is."""
        wishes = {"max_tokens": max_tokens, "prompt": prompt if prompt.images else None}
        how: dict[str, Any] = {name: wish for name, wish in wishes.items() if wish is not None}
        async with self.slots.turn(ROLLOUT, self.lengths.of(prompt.row)) as slot:
            await self.unless_over()
            written = await slot.pick(self.engines).complete(token_ids, seed, greedy=greedy, **how)
            slot.num_tokens, slot.seed = len(written.token_ids), seed
        return written

    def deal(self, finished: Sequence[Finished], num_groups: int) -> list[Group]:
        """The groups that this rank trains on. What can teach and is not dealt is kept for the next round."""
        peers = self.peers
        at, cost = peers.rank, self.rules.cost.of
        offers = [
            Offer(at, index, item.group.draw.position, cost(item.group), item.teaches, item.lesson)
            for index, item in enumerate(finished)
        ]
        deal = deal_groups(
            all_offers := peers.gather_offers(offers), world=peers.world, per_rank=num_groups
        )
        self.learn_order(all_offers)
        received = peers.exchange(deal.moves, [item.group for item in finished])
        dealt = {offer.key for hand in deal.chosen for offer in hand}
        self.surplus.put(
            [item for item, offer in zip(finished, offers, strict=True) if offer.key not in dealt]
        )
        self.note_all(deal.metrics())
        return [
            finished[offer.index].group if offer.rank == peers.rank else received[offer.key]
            for offer in deal.chosen[peers.rank]
        ]
