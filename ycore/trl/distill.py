"""On-policy distillation over rounds that ycore makes: the policy writes, and a teacher scores its tokens.

By default the loss is TRL's clipped loss with an advantage for each token, log p_teacher - log p_policy of the token
written: the gradient is that of the reverse KL of each token's distribution, sum over v of p_policy(v)
(log p_policy(v) - log p_teacher(v)), by REINFORCE and without the KL of the tokens after it (discount 0), as in MOPD
(arXiv 2601.02780, eq. 8) and GKD's on-policy case (arXiv 2306.13649). The estimate itself as a loss would have no
gradient at all: its expected gradient is that of a distribution's sum, which is constant.

An exact divergence (`divergence.exact`) is itself the loss, a mean over the tokens of the step: at each place that the
policy reached it compares the whole distributions (GKD with tokens of the student's own, arXiv 2306.13649, eq. 1).
"""

import functools
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import GRPOConfig

from ycore.advantages import ESTIMATORS
from ycore.config.learners import DistillSettings
from ycore.errors import ConfigError
from ycore.trl.batches import loss_mask
from ycore.trl.divergence import exact as divergence_of
from ycore.trl.forward import Compare, has_plain_logits, packed_scores, score_tokens
from ycore.trl.packing import IGNORE, path_of, use_segments
from ycore.trl.token_rewards import TokenRewardTrainer


class Trainer(TokenRewardTrainer):
    """Example: `Trainer(model=..., teachers=[0], reward_funcs=[teacher, task], ...)`.

    Args:
        teachers: which of the reward sources are teachers. The others give an advantage to whole completions, as in
            GRPO, and the weights of the sources weigh one against the other.
        exact: an exact divergence instead of the tokens' advantages; `folders` are then the teachers' models.
    """

    config_class = GRPOConfig
    skips_equal_rewards = False

    def __init__(
        self,
        *args: Any,
        teachers: Sequence[int],
        exact: DistillSettings | None = None,
        folders: Sequence[Path] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._teachers = list(teachers)
        self._divergences: list[Tensor] = []
        if exact is not None:
            self.beside = [self._load(folder) for folder in folders]
            compare = functools.partial(divergence_of, exact.divergence, beta=exact.beta)
            policy = self.bare_model
            add_teachers(getattr(policy, "get_base_model", lambda: policy)(), self.beside, compare)

    def _load(self, folder: Path) -> PreTrainedModel:
        """A teacher's model, frozen, whose attention is packed as the policy's; ConfigError where it cannot be."""
        way_out = "leave distill.divergence out, and the teacher has engines"
        if is_deepspeed_zero3_enabled() or self.is_fsdp_enabled:
            raise ConfigError(
                f"an exact divergence reads whole output layers, which are sharded here; {way_out}"
            )
        policy = self.accelerator.unwrap_model(self.model)
        attention = "sdpa" if self.packed_by == "segments" else policy.config._attn_implementation
        teacher: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16 if self.args.bf16 else torch.float32,
            attn_implementation=attention,
            trust_remote_code=self.args.trust_remote_code,
        )
        if self.packed_by is None or path_of(teacher) != self.packed_by:
            raise ConfigError(
                f"the attention of policy and teacher {folder} cannot both be packed; {way_out}"
            )
        if not (has_plain_logits(teacher) and has_plain_logits(policy)):
            raise ConfigError(f"policy or teacher {folder} caps or scales its logits; {way_out}")
        if self.packed_by == "segments":
            use_segments(teacher)
        return teacher.requires_grad_(False).eval().to(self.accelerator.device)

    def _own_advantages(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """(B, T): the teachers' of each token, and the rewards' of its completion.

        The policy's log-probabilities are those of the engine that wrote the tokens, as the teacher's are an engine's.
        The trainer's own would add the gap between trainer and engine, whose mean is not 0, to every token.
        """
        mask = loss_mask(batch)
        if self.beside:
            return self._own_and_taught(mask)
        policy = batch.get("sampling_per_token_logps")
        policy = self._old_logps(batch) if policy is None else policy
        weights = self.reward_weights.tolist()
        advantages = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
        sums = torch.zeros(2, dtype=torch.float64, device=mask.device)
        for source in self._teachers:
            teacher = self._taught(source, mask.size(1)).to(mask.device)
            found = log_ratios(teacher, policy, mask)
            advantages += weights[source] * found
            sums += torch.stack([-found.sum(), (mask * ~teacher.isnan()).sum().double()])
        kl, count = self._add_up(sums).tolist()
        self.record("ycore/teacher/kl", kl / max(1.0, count))
        return {"advantages": (advantages + self._of_rewards(mask)).float()}

    def _of_rewards(self, mask: Tensor) -> Tensor:
        """(B, T): the advantages of the sources that are no teachers."""
        weights = self.reward_weights.tolist()
        if not any(weight for source, weight in enumerate(weights) if source not in self._teachers):
            return torch.zeros_like(mask, dtype=torch.float64)
        of_rewards = self._estimated_advantages(self._advantage or ESTIMATORS["group"])
        return of_rewards.double().unsqueeze(1) * mask

    def _own_and_taught(self, mask: Tensor) -> dict[str, Tensor]:
        """The advantages of the rewards, and the weight of each teacher's divergence, (B, S); 0 where it has none."""
        rewards = torch.tensor([one.rewards for one in self._round], device=mask.device)[
            :, self._teachers
        ]
        weights = self.reward_weights.to(mask.device)[self._teachers]
        return {"advantages": self._of_rewards(mask).float(), "taught": weights * ~rewards.isnan()}

    def _score(self, model: torch.nn.Module, *inputs: Any, **how: Any) -> tuple[Tensor, Tensor]:
        if self._micro_batch is None or not self.beside:
            return super()._score(model, *inputs, **how)
        names = (
            "log_probs",
            "entropy",
            *(f"teacher-{number}" for number in range(len(self.beside))),
        )
        logps, entropies, *self._divergences = packed_scores(
            model, *inputs, path=self.packed_by, names=names, with_teachers=True, **how
        )
        return logps, entropies

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss, and each teacher's exact divergence: the mean over the tokens of the whole step."""
        loss = super()._compute_loss(model, inputs)
        if not self.beside:
            return loss
        mask = loss_mask(inputs)
        tokens = (
            inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
        )  # of the round, a rank
        a_step = tokens * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        for found, weights in zip(self._divergences, inputs["taught"].unbind(1), strict=True):
            loss = loss + (found * mask * weights.unsqueeze(1)).sum() / a_step
            seen = found.detach()[(mask * (weights != 0).unsqueeze(1)).bool()]
            if seen.numel():
                self.record("ycore/teacher/divergence", seen.mean().item())
        return loss

    def _taught(self, source: int, width: int) -> Tensor:
        """A teacher's log-probabilities of this rank's tokens, (B, T); NaN where it gave none."""
        rows = (sequence.taught[source] or () for sequence in self._round)
        return torch.tensor(
            [[*row, *[torch.nan] * (width - len(row))] for row in rows], dtype=torch.float64
        )

    def _totals(self, rewards: Tensor) -> Tensor:
        """The weighted sums of the sources that are no teachers."""
        others = rewards.clone()
        others[:, self._teachers] = torch.nan
        return super()._totals(others)


def add_teachers(policy: Any, teachers: Sequence[PreTrainedModel], compare: Compare) -> None:
    """Let the policy's forward also give `compare` of it and each teacher, in calls with `with_teachers=True`.

    Args:
        policy: transformers' own model. The teachers stay outside of its modules: of no state dict, and of no rank's
            exchange of gradients.
    """
    inner = policy.forward

    @functools.wraps(getattr(inner, "__func__", inner))
    def forward(self: Any, *args: Any, with_teachers: bool = False, **kwargs: Any) -> Any:
        if not with_teachers:
            return inner(*args, **kwargs)
        labels, _ = kwargs.pop("shift_labels"), kwargs.pop("fused_lm_head")
        wanted, head = labels != IGNORE, self.get_output_embeddings()
        with torch.no_grad():
            rows = [
                teacher.base_model(*args, **kwargs).last_hidden_state[wanted]
                for teacher in teachers
            ]
        others = [
            (row, teacher.get_output_embeddings())
            for row, teacher in zip(rows, teachers, strict=True)
        ]
        hidden = self.base_model(*args, **kwargs).last_hidden_state[wanted]
        names = ["log_probs", "entropy", *(f"teacher-{number}" for number in range(len(teachers)))]
        found = score_tokens(
            hidden,
            head.weight,
            head.bias,
            labels[wanted],
            temperature=1.0,
            others=others,
            compare=compare,
        )
        empty = torch.zeros(labels.shape, device=labels.device)
        return {
            name: empty.masked_scatter(wanted, one) for name, one in zip(names, found, strict=True)
        }

    policy.forward = types.MethodType(forward, policy)


def log_ratios(teacher_BT: Tensor, policy_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """log p_teacher - log p_policy of each token, (B, T) float64; 0 outside of the mask and where one is not known."""
    found = teacher_BT.double() - policy_BT.double()
    return torch.where(mask_BT.bool() & found.isfinite(), found, 0)


TRAINERS = {"grpo": Trainer}
"""By `loss_from`."""
