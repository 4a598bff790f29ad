"""Functions of one's own that run in the trainer's process: `--advantage file.py:function` and the like.

They are loaded and called once on made-up completions before the run starts. An error names the file and the line.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ycore.errors import ConfigError
from ycore.rewards.loading import inputs_of, reward_names
from ycore.sandbox.channel import exception_line, load_named
from ycore.types import Completion, Draw, Group, JsonObject, Prompt, Score


@dataclass(frozen=True, kw_only=True)
class ScoredGroup:
    """The completions of one prompt, scored; tensors of floats are float64.

    Axes: `_G` completions of the group, `_T` tokens of its longest, `_P` prompts of all ranks in the step.
    """

    step: int
    prompt: Prompt  # `prompt.columns` are those of its row, and `prompt.content` is what the policy read
    completions: Sequence[Completion]  # with `text`, `messages`, `token_ids`, `finish_reason`
    rewards: Tensor  # (G,): weighted sums, under constraints what these make of them; NaN: not scored
    rewards_by_source: Mapping[str, Tensor]  # (G,) of each reward, by its name in metrics
    mask: Tensor  # (G, T) of bools: the policy's tokens
    batch_rewards: Tensor  # (P, G): `rewards` of all prompts of all ranks


class OwnFunction:
    """A function named `file.py:function`; `kind` is the option that named it."""

    def __init__(self, kind: str, name: str) -> None:
        self._label = f"{kind} {name!r}"
        self._file = Path(name.rpartition(":")[0]).expanduser().absolute()
        self._function: Callable[..., Any] = load_named(name, kind=kind, error=ConfigError)

    def __call__(self, *values: Any, **named: Any) -> Any:
        try:
            return self._function(*values, **named)
        except Exception as problem:  # whatever a person's function raises
            frames = traceback.extract_tb(problem.__traceback__)[1:]
            lines = [frame.lineno for frame in frames if Path(frame.filename) == self._file]
            place = f"{self._file}:{lines[-1]}" if lines else "its call"
            raise self.error(f"{place} raised {exception_line(problem)}") from problem

    def error(self, rule: str) -> ConfigError:
        return ConfigError(f"{self._label}: {rule}; correct it, and go on with --resume")

    def advantages(self, group: ScoredGroup) -> Tensor:
        """The group's advantages, (G,) or by token (G, T), float32; 0 where no reward scored the completion."""
        values = self._numbers(self(group)).to(group.mask.device)
        if values.shape not in (group.mask.shape, group.mask.shape[:1]):
            num, width = group.mask.shape
            raise self.error(
                f"it returns a number for each of the group's {num} completions, or for each of their tokens, "
                f"({num}, {width}); it returned {tuple(values.shape)}"
            )
        is_counted = ~group.rewards.isnan()
        if values.dim() == 2:
            is_counted = is_counted.unsqueeze(1) & group.mask
        if not values[is_counted].isfinite().all():
            raise self.error("an advantage is not finite")
        return values.where(is_counted, 0)

    def weights(self, groups: Sequence[ScoredGroup]) -> Tensor:
        """The weight of each completion of the groups, (N,) float32, of which 0 leaves it out."""
        weights_PG = self._numbers(self(groups))
        expected = (len(groups), len(groups[0].completions))
        if (
            weights_PG.shape != expected
            or not (weights_PG.isfinite() & (weights_PG >= 0)).all()
        ):
            raise self.error(
                f"it returns a weight of 0 or more for each completion of each group, {expected}; it returned "
                f"{weights_PG.tolist()}"[:300]
            )
        return weights_PG.flatten().to(groups[0].mask.device)

    def loss(self, *, mask: Tensor, **offered: Any) -> tuple[Tensor, JsonObject]:
        """The loss of a micro-batch, a number or by token (B, T), and its metrics, from what the function takes."""
        offered["mask"] = mask
        inputs = inputs_of(self._function)
        returned = self(**inputs.accepted(offered))
        loss, metrics = returned if isinstance(returned, tuple) else (returned, None)
        is_loss = (
            isinstance(loss, Tensor)
            and loss.shape in ((), mask.shape)
            and loss.requires_grad
            and loss.isfinite().all()
        )
        if not is_loss:
            raise self.error(
                "it returns a loss and its metrics; a loss is one finite number that depends on logprobs, or one for "
                f"each token, {tuple(mask.shape)}; it returned {loss}"[:300]
            )
        return loss, dict(metrics or {})

    def _numbers(self, rows: Any) -> Tensor:
        try:
            return torch.stack(
                [torch.as_tensor(row, dtype=torch.float32) for row in rows]
            ).detach()
        except (TypeError, ValueError, RuntimeError) as problem:
            raise self.error(f"it returned no numbers: {exception_line(problem)}") from problem


def scored_groups(
    groups: Sequence[Group],
    totals_PG: Tensor,
    *,
    names: Sequence[str],
    batch_rewards: Tensor,
    step: int,
) -> list[ScoredGroup]:
    """The groups of a rank as its functions get them; `totals_PG` are their `rewards`, `names` of the reward sources."""
    scored = []
    for group, totals_G in zip(groups, totals_PG.double(), strict=True):
        masks = [torch.tensor(completion.mask) for completion in group.completions]
        by_source = totals_G.new_tensor(np.array(group.rewards_GR, float))  # NaN for None
        scored.append(
            ScoredGroup(
                step=step,
                prompt=group.draw.prompt,
                completions=group.completions,
                rewards=totals_G,
                rewards_by_source=dict(zip(names, by_source.unbind(dim=1), strict=True)),
                mask=pad_sequence(masks, batch_first=True).bool().to(totals_G.device),
                batch_rewards=batch_rewards,
            )
        )
    return scored


def own_functions(config: Any) -> dict[str, OwnFunction]:
    """Load the functions of a run, by the option that names each."""
    return {kind: OwnFunction(kind, name) for kind, name in config.own_functions.items()}


def check_own_functions(config: Any, prompt: Prompt) -> None:
    """Call each function once on made-up completions of a prompt; ConfigError where one does not work."""
    functions = own_functions(config)
    group = _made_up_group(config, prompt)
    if "keep" in functions:
        functions["keep"].weights([group, group])
    if "loss" in functions:
        has_reference = config.trl.get("beta") and not config.has_kl_in_reward
        likely_BT = torch.full(group.mask.shape, -1.0)
        functions["loss"].loss(
            logprobs=likely_BT.clone().requires_grad_(),
            old_logprobs=likely_BT,
            ref_logprobs=likely_BT if has_reference else None,
            engine_weights=torch.ones_like(likely_BT),
            entropies=-likely_BT,
            advantages=likely_BT,
            rewards=group.rewards.float(),
            mask=group.mask.long(),
            group_size=config.group_size,
            step=0,
        )
    if "advantage" in functions:
        advantages = functions["advantage"].advantages(group)
        if advantages.dim() == 2:
            config.check_token_advantages(f"--advantage {config.own_functions['advantage']}")


def _made_up_group(config: Any, prompt: Prompt) -> ScoredGroup:
    """A group whose completions have one token, two, and so on, and the rewards 0 and 1 in turn."""
    completions = [
        Completion(
            token_ids=(0,) * length,
            logprobs=(-1.0,) * length,
            text="made up",
            finish_reason="stop",
            policy_version=0,
        )
        for length in range(1, config.group_size + 1)
    ]
    names = reward_names(config.rewards)
    scores_GR = [(Score(index % 2),) * len(names) for index in range(config.group_size)]
    group = Group(Draw(0, prompt, (0,)), tuple(completions), tuple(scores_GR))
    totals_PG = torch.arange(config.group_size).view(1, -1) % 2
    (scored,) = scored_groups(
        [group],
        totals_PG,
        names=names,
        batch_rewards=totals_PG.double(),
        step=0,
    )
    return scored
