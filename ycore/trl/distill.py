"""On-policy distillation over rounds that ycore makes: the policy writes, and a teacher scores its tokens.

By default the loss is TRL's clipped loss with an advantage for each token, log p_teacher - log p_policy of the token
written: the gradient is that of the reverse KL of each token's distribution, sum over v of p_policy(v)
(log p_policy(v) - log p_teacher(v)), by REINFORCE and without the KL of the tokens after it (discount 0), as in MOPD
(arXiv 2601.02780, eq. 8) and GKD's on-policy case (arXiv 2306.13649). The estimate itself as a loss would have no
gradient at all: its expected gradient is that of a distribution's sum, which is constant.

An exact divergence (`exact_divergence`) is itself the loss, a mean over the tokens of the step: at each place that the
policy reached it compares the whole distributions (GKD with tokens of the student's own, arXiv 2306.13649, eq. 1).
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled

from ycore.advantages import ESTIMATORS
from ycore.config.learners import DistillConfig, DistillSettings
from ycore.config.schema import TEACHER
from ycore.errors import ConfigError
from ycore.judge.declaration import teachers_of
from ycore.models.fetch import fetch_named
from ycore.trl.batches import Batch, loss_mask, reward_values
from ycore.trl.forward import Compare, add_outputs, has_plain_logits, score_places
from ycore.trl.packing import IGNORE, path_of, use_segments
from ycore.trl.policy_gradient import PolicyGradientTrainer


class Trainer(PolicyGradientTrainer):
    """Example: `Trainer(model=..., teachers=[0], reward_funcs=[teacher, task], ...)`.

    Args:
        teachers: which of the reward sources are teachers. The others give an advantage to whole completions, as in
            GRPO, and the weights of the sources weigh one against the other.
        exact: an exact divergence instead of the tokens' advantages; `folders` are then the teachers' models.
    """

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
        if exact is not None:
            self.frozen_models = [self._load(folder) for folder in folders]
            self.more_outputs = [f"teacher-{number}" for number in range(len(folders))]
            compare = functools.partial(exact_divergence, exact.divergence, beta=exact.beta)
            add_outputs(self.base_model, functools.partial(self._compared, compare))

    @classmethod
    def settings_of(cls, config: DistillConfig, model: Path) -> dict[str, Any]:
        """Also which sources are teachers, and the folders of those that the trainer holds."""
        rewards = enumerate(config.rewards)
        teachers = [source for source, spec in rewards if spec.kind == TEACHER]
        settings = {**super().settings_of(config, model), "teachers": teachers}
        if config.teaches_exactly:  # the launcher has fetched the models
            settings["exact"] = config.distill
            settings["folders"] = [
                fetch_named(teacher.model, trust_remote_code=config.trust_remote_code)
                for teacher in teachers_of(config)
            ]
        return settings

    def _load(self, folder: Path) -> PreTrainedModel:
        """A teacher's model, frozen, whose attention is packed as the policy's; ConfigError where it cannot be."""
        way_out = "leave distill.divergence out, and the teacher has engines"
        if is_deepspeed_zero3_enabled() or self.is_fsdp_enabled:
            raise ConfigError(
                f"an exact divergence reads whole output layers, which are sharded here; {way_out}"
            )
        policy = self.accelerator.unwrap_model(self.model)
        attention = (
            "sdpa" if self.packed_by == "segments" else policy.config._attn_implementation
        )
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
            raise ConfigError(
                f"policy or teacher {folder} caps or scales its logits; {way_out}"
            )
        if self.packed_by == "segments":
            use_segments(teacher)
        return teacher.requires_grad_(False).eval().to(self.accelerator.device)

    # -- the round ---------------------------------------------------------------------------------------------------

    def _replaced_advantages(self, batch: Batch) -> dict[str, Tensor]:
        """Advantages, (B, T): the teachers' of each token, and the rewards' of its completion.

        With an exact divergence the rewards' alone, and the weight of each teacher's divergence, (B, S), which is 0
        where it has none.

        The policy's log-probabilities are those of the engine that wrote the tokens, as the teacher's are an engine's.
        The trainer's own would add the gap between trainer and engine, whose mean is not 0, to every token.
        """
        mask = loss_mask(batch)
        if self.frozen_models:
            rewards = torch.tensor(
                [reward_values(sequence.scores) for sequence in self._round], device=mask.device
            )
            weights = self.reward_weights.to(mask.device)[self._teachers]
            is_known = ~rewards[:, self._teachers].isnan()
            advantages = self._reward_advantages(mask).float()
            return {"advantages": advantages, "teacher_weights": weights * is_known}
        policy = batch.get("sampling_per_token_logps")
        policy = self._old_logps(batch) if policy is None else policy
        source_weights = self.reward_weights.tolist()
        advantages = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
        sums = torch.zeros(2, dtype=torch.float64, device=mask.device)
        for source in self._teachers:
            teacher = self._teacher_logps(source, mask.size(1)).to(mask.device)
            ratios = log_ratios(teacher, policy, mask)
            advantages += source_weights[source] * ratios
            sums += torch.stack([-ratios.sum(), (mask * ~teacher.isnan()).sum().double()])
        kl, count = self._add_up(sums).tolist()
        self.record("ycore/teacher/kl", kl / max(1.0, count))
        return {"advantages": (advantages + self._reward_advantages(mask)).float()}

    def _reward_advantages(self, mask: Tensor) -> Tensor:
        """(B, T): the advantages of the sources that are no teachers."""
        weights = enumerate(self.reward_weights.tolist())
        if not any(weight for source, weight in weights if source not in self._teachers):
            return torch.zeros_like(mask, dtype=torch.float64)
        advantages = self._estimated_advantages(self._advantage or ESTIMATORS["group"])
        return advantages.double().unsqueeze(1) * mask

    def _teacher_logps(self, source: int, width: int) -> Tensor:
        """A teacher's log-probabilities of this rank's tokens, (B, T); NaN where it gave none."""
        rows = (sequence.scores[source].logprobs or () for sequence in self._round)
        padded = [[*row, *[torch.nan] * (width - len(row))] for row in rows]
        return torch.tensor(padded, dtype=torch.float64)

    def _totals(self, rewards: Tensor) -> Tensor:
        """The weighted sums of the sources that are no teachers."""
        rewards = rewards.clone()
        rewards[:, self._teachers] = torch.nan
        return super()._totals(rewards)

    # -- the loss ----------------------------------------------------------------------------------------------------

    def _compared(
        self, compare: Compare, *, shift_labels: Tensor, fused_lm_head: bool, **row: Any
    ) -> dict[str, Tensor]:
        """Return the outputs of the policy's forward, and `compare` of it and each teacher.

        The teachers stay outside of its modules: of no state dict, and of no rank's exchange of gradients.
        """
        wanted = shift_labels != IGNORE
        with torch.no_grad():
            other_heads = [
                (
                    teacher.base_model(**row).last_hidden_state[wanted],
                    teacher.get_output_embeddings(),
                )
                for teacher in self.frozen_models
            ]
        policy = self.base_model
        return score_places(
            policy.base_model(**row).last_hidden_state,
            shift_labels,
            policy.get_output_embeddings(),
            ("log_probs", "entropy", *self.more_outputs),
            temperature=1.0,
            other_heads=other_heads,
            compare=compare,
        )

    def _compute_loss(self, model: nn.Module, inputs: Batch) -> Tensor:
        """TRL's loss, and each teacher's exact divergence: the mean over the tokens of the whole step."""
        loss = super()._compute_loss(model, inputs)
        if not self.frozen_models:
            return loss
        mask = loss_mask(inputs)
        step_tokens = self._step_tokens(inputs)
        by_teacher = zip(self._more, inputs["teacher_weights"].unbind(1), strict=True)
        for divergence, weights in by_teacher:
            loss = loss + (divergence * mask * weights.unsqueeze(1)).sum() / step_tokens
            counted = divergence.detach()[(mask * (weights != 0).unsqueeze(1)).bool()]
            if counted.numel():
                self.record("ycore/teacher/divergence", counted.mean().item())
        return loss


def exact_divergence(name: str, log_p: Tensor, log_q: Tensor, *, beta: float = 0.5) -> Tensor:
    """The divergence of the policy p from a teacher q, over the whole vocabulary: (...,), in nats, with gradient in p.

    Args:
        name: `reverse-kl` is KL(p || q), `forward-kl` is KL(q || p), and `js` is GKD's beta KL(q || m) +
            (1 - beta) KL(p || m) with m = beta q + (1 - beta) p (arXiv 2306.13649, eq. 1).
        log_p: (..., V), a log-softmax with gradient; those of some tokens alone are no distribution.
        log_q: (..., V).

    The gradient by `log_p` is written out, without what a softmax takes away. So it is 0 where the two are equal, and
    not rounding, of which Adam would make a step.
    """
    with torch.no_grad():
        p = log_p.exp()
        q = log_q.exp()
        gap = log_q - log_p
        if name == "reverse-kl":
            terms = slopes = -p * gap
        elif name == "forward-kl":
            terms = q * gap
            slopes = p - q
        else:
            below = torch.log1p(beta * torch.expm1(gap))
            above = gap + torch.log1p((1 - beta) * torch.expm1(-gap))
            mixed = torch.where(gap > 0, above, below)  # log(m / p)
            slopes = (beta - 1) * p * mixed
            terms = beta * q * (gap - mixed) + slopes
    return terms.sum(-1) + (slopes * (log_p - log_p.detach())).sum(-1)


def log_ratios(teacher_BT: Tensor, policy_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """log p_teacher - log p_policy of each token, (B, T) float64; 0 outside of the mask and where one is not known."""
    ratios_BT = teacher_BT.double() - policy_BT.double()
    return torch.where(mask_BT.bool() & ratios_BT.isfinite(), ratios_BT, 0)
