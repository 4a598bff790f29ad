"""Updates of a flow model from a round's pictures and rewards, by DiffusionNFT or by Flow-GRPO."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

import torch
from torch import Tensor, nn

from ycore.flow.flow_math import (
    NoisyStep,
    SamplingPath,
    group_advantages,
    grpo_loss,
    nft_loss,
    noised,
    sde_step,
    share_of,
    step_kl,
    velocity_penalty,
)
from ycore.flow.flow_settings import FlowConfig
from ycore.flow.picture_rounds import FlowPolicy, Picture, Trajectories, Weights
from ycore.round.sampling import Rules
from ycore.scoring.group_rewards import compared_rewards, without_none
from ycore.types import Group, Metrics, number_from


@dataclass(frozen=True)
class Batch:
    """A round's pictures [B, C, H, W], points [B, length + 1, C, H, W] and log-densities [B, length] of their steps with
    noise; classes, first steps with noise, and advantages, all [B]."""

    pictures: Tensor
    points: Tensor
    logprobs: Tensor
    classes: Tensor
    firsts: Tensor
    advantages: Tensor

    def __len__(self) -> int:
        return len(self.pictures)


@dataclass(eq=False)
class Learner:
    """Example: `learner = Learner(policy, config, path, trajectories, rules); learner.learn(groups, step=0)`.

    Args:
        trajectories: of the pictures to learn from.
    """

    policy: FlowPolicy
    config: FlowConfig
    path: SamplingPath
    trajectories: Trajectories
    rules: Rules

    def __post_init__(self) -> None:
        self.old = self.policy.copy()
        """The weights that draw, with nft."""
        self.optimizer = torch.optim.AdamW(
            self.policy.trained.values(), lr=self.config.learning_rate, weight_decay=0.0
        )

    @property
    def drawing(self) -> Weights | None:
        """Return the weights that the next round's pictures are drawn with; None for the policy's own."""
        return self.old if self.config.flow.method == "nft" else None

    def learn(self, groups: Sequence[Group], *, step: int) -> Metrics:
        """Update the weights, and return the step's metrics. Without a group that teaches nothing changes."""
        config = self.config
        rewards = [compared_rewards(group, self.rules.reward_weights) for group in groups]
        num_teaching = sum(map(self.rules.can_teach, groups))
        metrics = {
            "frac_reward_zero_std": 1 - num_teaching / len(groups),
            "learning_rate": config.learning_rate,
        }
        if known := without_none(itertools.chain(*rewards)):
            metrics |= {"reward": fmean(known), "reward_std": pstdev(known)}
        if not num_teaching:
            return metrics | {"ycore/skipped": 1.0}
        batch = self._batch(groups, group_advantages(rewards))
        for number in range(config.flow.updates):
            metrics |= self._update(batch, seed=f"{config.seed}/{step}/{number}")
        if config.flow.method == "nft":
            kept = min(config.flow.old_rate * step, config.flow.old_most)
            for name, weight in self.policy.copy().items():
                self.old[name] = self.old[name].lerp(weight, 1 - kept)
        return metrics | {"ycore/skipped": 0.0}

    def _batch(self, groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> Batch:
        pictures = [
            Picture.of(completion.text) for group in groups for completion in group.completions
        ]
        names = {picture.kept for picture in pictures}
        files = {name: self.trajectories.get(name) for name in names}

        def stacked(name: str) -> Tensor:
            return torch.stack([files[picture.kept][name][picture.row] for picture in pictures])

        classes = [group.draw.token_ids[0] for group in groups for _ in group.completions]
        return Batch(
            stacked("pictures"),
            stacked("points"),
            stacked("logprobs"),
            torch.tensor(classes),
            torch.tensor([picture.first for picture in pictures]),
            torch.tensor([advantage for group in advantages for advantage in group]),
        )

    def _update(self, batch: Batch, *, seed: str) -> Metrics:
        self.optimizer.zero_grad()
        parts = (
            self._nft(batch, seed) if self.config.flow.method == "nft" else self._grpo(batch)
        )
        sums: Metrics = {}
        for loss, measured in parts:
            loss.backward()
            for name, value in ({"loss": loss.item()} | measured).items():
                sums[name] = sums.get(name, 0.0) + value
        weights = self.policy.trained.values()
        norm = nn.utils.clip_grad_norm_(weights, self.config.max_grad_norm)
        self.optimizer.step()
        return sums | {"grad_norm": float(norm)}

    def _nft(self, batch: Batch, seed: str) -> Iterator[tuple[Tensor, Metrics]]:
        """Yield the loss of each part of the batch, each at a time of its own, and what it adds to the metrics."""
        flow = self.config.flow
        size = len(batch)
        device = self.policy.device
        generator = torch.Generator().manual_seed(number_from(f"learn {seed}"))
        times = torch.rand(size, generator=generator)
        noise = torch.randn(batch.pictures.shape, generator=generator)
        points = noised(batch.pictures, noise, times)
        shares = share_of(batch.advantages)
        for rows in _parts(size, flow.batch):
            x = points[rows]
            t = times[rows]
            classes = batch.classes[rows]
            with torch.no_grad():
                v_old = self.policy.velocity(x, t, classes, self.old)
            v = self.policy.velocity(x, t, classes)
            loss = nft_loss(
                v,
                v_old,
                x.to(device),
                batch.pictures[rows].to(device),
                t.to(device),
                shares[rows].to(device),
                b=flow.b,
            )
            measured = {}
            if flow.kl:
                with torch.no_grad():
                    v_reference = self.policy.velocity(x, t, classes, self.policy.reference)
                gap = velocity_penalty(v, v_reference)
                loss = loss + flow.kl * gap
                measured["ycore/flow/velocity_gap"] = gap.sum().item() / size
            yield loss.sum() / size, measured

    def _grpo(self, batch: Batch) -> Iterator[tuple[Tensor, Metrics]]:
        """Yield the loss of each part of the batch at each of its steps with noise, and what it adds to the metrics."""
        flow = self.config.flow
        length = self.path.length
        share = 1 / (len(batch) * length)
        for number, rows in itertools.product(range(length), _parts(len(batch), flow.batch)):
            step = self._replay(batch, rows, number, None)
            device = step.mean.device
            logprob = step.logprob(batch.points[rows, number + 1].to(device))
            old = batch.logprobs[rows, number].to(device)
            clipped = grpo_loss(logprob, old, batch.advantages[rows].to(device), clip=flow.clip)
            loss = clipped.loss
            measured = {
                "ycore/flow/ratio": clipped.ratio.sum().item() * share,
                "ycore/flow/ratio_off": (clipped.ratio - 1).abs().sum().item() * share,
                "ycore/flow/clipped": clipped.is_clipped.sum().item() * share,
            }
            if flow.kl:
                with torch.no_grad():
                    reference = self._replay(batch, rows, number, self.policy.reference)
                kl = step_kl(step, reference)
                loss = loss + flow.kl * kl
                measured["kl"] = kl.sum().item() * share
            yield loss.sum() * share, measured

    def _replay(
        self, batch: Batch, rows: slice, number: int, weights: Weights | None
    ) -> NoisyStep:
        """Make the `number`th step with noise again, as these weights would have made it."""
        places = batch.firsts[rows] + number
        times = torch.tensor(self.path.times)
        x = batch.points[rows, number]
        v = self.policy.velocity(x, times[places], batch.classes[rows], weights)
        return sde_step(
            x.to(v.device),
            v,
            times[places].to(v.device),
            times[places + 1].to(v.device),
            self.path,
        )


def _parts(size: int, most: int) -> list[slice]:
    return [slice(start, min(size, start + most)) for start in range(0, size, most)]
