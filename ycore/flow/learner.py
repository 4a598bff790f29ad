"""One round's pictures and rewards become one or more updates of the policy, by DiffusionNFT or by Flow-GRPO."""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

import torch

from ycore.flow.denoising import NOISY, Rule, Sampling, Step, grid, step
from ycore.flow.flow_settings import FlowConfig
from ycore.flow.objectives import (
    group_advantages,
    grpo_loss,
    nft_loss,
    noised,
    share_of,
    step_kl,
    velocity_penalty,
)
from ycore.flow.policy import Policy, Weights
from ycore.flow.sampler import Picture, Trajectories
from ycore.scoring.group_rewards import can_teach, min_stds, total_reward
from ycore.types import Group


def sampling_of(config: FlowConfig, *, shift: float) -> tuple[Sampling, Sampling]:
    """How a round's pictures are drawn, and those that measure the model. `shift` is the model's own."""
    flow = config.flow
    shift = flow.shift or shift
    rule: Rule = flow.sampler or ("sde" if flow.method == "grpo" else "ode")
    length = (flow.window or flow.steps - 1) if rule in NOISY else 0
    return Sampling(grid(flow.steps, shift=shift), rule, flow.noise, length), Sampling(
        grid(flow.eval_steps, shift=shift)
    )


@dataclass(frozen=True, slots=True)
class Batch:
    """A round's pictures: [B, C, H, W], with noise their points [B, length + 1, C, H, W] and log-densities [B, length];
    classes, places of the first step with noise, and advantages, all [B]."""

    pictures: torch.Tensor
    points: torch.Tensor
    logprobs: torch.Tensor
    classes: torch.Tensor
    firsts: torch.Tensor
    advantages: torch.Tensor

    def __len__(self) -> int:
        return len(self.pictures)


class Learner:
    """Example: `learner = Learner(policy, config, how, kept); metrics = learner.learn(groups, step=0)`.

    Args:
        kept: where the trajectories of the pictures are.
    """

    def __init__(
        self, policy: Policy, config: FlowConfig, how: Sampling, kept: Trajectories
    ) -> None:
        self.policy, self._config, self._how, self._kept = policy, config, how, kept
        self.old = policy.copy()
        """Of nft: the weights that draw."""
        self.optimizer = torch.optim.AdamW(
            policy.trained.values(), lr=config.rate, weight_decay=0.0
        )

    @property
    def drawing(self) -> Weights | None:
        """The weights that the next round's pictures are drawn with; None for the policy's own."""
        return self.old if self._config.flow.method == "nft" else None

    def learn(self, groups: Sequence[Group], *, step: int) -> dict[str, float]:
        """Update the weights, and return the step's metrics. Without a group that teaches nothing changes."""
        config = self._config
        weights = [reward.weight for reward in config.rewards]
        stds_R = min_stds(config.rewards, config.sampling.dust, default_range=1.0)
        rewards = [
            [total_reward(scores, weights) for scores in group.scores_GR] for group in groups
        ]
        taught = [can_teach(group, weights, min_stds_R=stds_R) for group in groups]
        known = [value for group in rewards for value in group if value is not None]
        found = {
            "frac_reward_zero_std": 1 - sum(taught) / len(groups),
            "learning_rate": config.rate,
        }
        if known:
            found |= {"reward": fmean(known), "reward_std": pstdev(known)}
        if not any(taught):
            return found | {"ycore/skipped": 1.0}
        batch = self._batch(groups, group_advantages(rewards))
        for number in range(config.flow.updates):
            found |= self._update(batch, seed=f"{config.seed}/{step}/{number}")
        if config.flow.method == "nft":
            keep = min(config.flow.old_rate * step, config.flow.old_most)
            for name, weight in self.policy.copy().items():
                self.old[name] = self.old[name].lerp(weight, 1 - keep)
        return found | {"ycore/skipped": 0.0}

    def _batch(self, groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> Batch:
        drawn = [
            Picture.of(completion.text) for group in groups for completion in group.completions
        ]
        files = {name: self._kept.get(name) for name in {one.kept for one in drawn}}

        def stacked(name: str) -> torch.Tensor:
            rows = [files[one.kept][name][one.row] for one in drawn if name in files[one.kept]]
            return torch.stack(rows) if rows else torch.zeros(len(drawn), 0)

        classes = [group.draw.token_ids[0] for group in groups for _ in group.completions]
        return Batch(
            stacked("pictures"),
            stacked("points"),
            stacked("logprobs"),
            torch.tensor(classes),
            torch.tensor([one.first for one in drawn]),
            torch.tensor([value for group in advantages for value in group]),
        )

    def _update(self, batch: Batch, *, seed: str) -> dict[str, float]:
        self.optimizer.zero_grad()
        parts = self._nft(batch, seed) if self._config.flow.method == "nft" else self._grpo(batch)
        sums: dict[str, float] = {}
        for loss, measured in parts:
            loss.backward()
            for name, value in ({"loss": loss.item()} | measured).items():
                sums[name] = sums.get(name, 0.0) + value
        norm = torch.nn.utils.clip_grad_norm_(
            self.policy.trained.values(), self._config.max_grad_norm
        )
        self.optimizer.step()
        return sums | {"grad_norm": float(norm)}

    def _nft(self, batch: Batch, seed: str) -> Iterator[tuple[torch.Tensor, dict[str, float]]]:
        """The loss of each part of the batch, each at a time of its own, and what it adds to the metrics."""
        flow, size = self._config.flow, len(batch)
        generator = _generator(seed)
        times = torch.rand(size, generator=generator)
        points = noised(
            batch.pictures, torch.randn(batch.pictures.shape, generator=generator), times
        )
        shares = share_of(batch.advantages)
        for rows in _parts(size, flow.batch):
            x, t, classes = points[rows], times[rows], batch.classes[rows]
            with torch.no_grad():
                v_old = self.policy.velocity(x, t, classes, self.old)
            v = self.policy.velocity(x, t, classes)
            device = v.device
            given = (one.to(device) for one in (x, batch.pictures[rows], t, shares[rows]))
            loss, measured = nft_loss(v, v_old, *given, b=flow.b), {}
            if flow.kl:
                with torch.no_grad():
                    v_reference = self.policy.velocity(x, t, classes, self.policy.reference)
                gap = velocity_penalty(v, v_reference)
                loss, measured = (
                    loss + flow.kl * gap,
                    {"ycore/flow/velocity_gap": gap.sum().item() / size},
                )
            yield loss.sum() / size, measured

    def _grpo(self, batch: Batch) -> Iterator[tuple[torch.Tensor, dict[str, float]]]:
        """The same, at each of the steps that were drawn with noise."""
        flow, length = self._config.flow, self._how.length
        share = 1 / (len(batch) * length)
        for number, rows in itertools.product(range(length), _parts(len(batch), flow.batch)):
            made = self._replay(batch, rows, number, None)
            old, gains = (
                one.to(made.logprob.device)
                for one in (batch.logprobs[rows, number], batch.advantages[rows])
            )
            clipped = grpo_loss(made.logprob, old, gains, clip=flow.clip)
            loss = clipped.loss
            measured = {
                "ycore/flow/ratio": clipped.ratio.sum().item() * share,
                "ycore/flow/ratio_off": (clipped.ratio - 1).abs().sum().item() * share,
                "ycore/flow/clipped": clipped.is_clipped.sum().item() * share,
            }
            if flow.kl:
                with torch.no_grad():
                    reference = self._replay(batch, rows, number, self.policy.reference)
                kl = step_kl(made, reference)
                loss, measured = loss + flow.kl * kl, measured | {"kl": kl.sum().item() * share}
            yield loss.sum() * share, measured

    def _replay(self, batch: Batch, rows: slice, number: int, weights: Weights | None) -> Step:
        """The step that was drawn as the `number`th with noise, as these weights would have made it."""
        how, places = self._how, batch.firsts[rows] + number
        times = torch.tensor(how.path.times)
        x, reached, now, then = (
            batch.points[rows, number], batch.points[rows, number + 1], times[places], times[places + 1]
        )  # fmt: skip
        v = self.policy.velocity(x, now, batch.classes[rows], weights)
        x, reached, now, then = (one.to(v.device) for one in (x, reached, now, then))
        return step(
            how.rule, x, v, now, then, level=how.level, near_one=how.near_one, reached=reached
        )


def _parts(size: int, most: int) -> list[slice]:
    return [slice(start, min(size, start + most)) for start in range(0, size, most)]


def _generator(seed: str) -> torch.Generator:
    digest = hashlib.blake2b(f"learn {seed}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
