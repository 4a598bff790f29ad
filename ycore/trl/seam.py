"""The private members of TRL's GRPOTrainer that ycore touches, in one file; a contract test holds them to TRL 1.16.

TRL builds the batch, computes advantages and losses, and trains. ycore makes the round, deals it into micro-batches,
and scores completions with one packed forward.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, Protocol

import torch
from accelerate.utils import gather, send_to_device, set_seed
from torch import Tensor, nn
from trl import GRPOTrainer
from trl.trainer import grpo_trainer
from trl.trainer.utils import (
    shuffle_sequence_dict,
    split_pixel_values_by_grid,
    split_tensor_dict,
    unsplit_pixel_values_by_grid,
)

from ycore.advantages import Estimator
from ycore.engine.sight import image_token_ids
from ycore.scoring.group_rewards import normalized_sums, rewards_differ, weighted_sums
from ycore.trl.base import DurableTrainer, bare
from ycore.trl.batches import (
    Batch,
    FlatSequence,
    RoundPosition,
    deal,
    flatten,
    later_prompt_lengths,
    loss_mask,
    reward_values,
    token_lags,
)
from ycore.trl.forward import (
    PaddedRows,
    Pictures,
    add_compact_head,
    needs_compact_head,
    never_write,
    packed_scores,
    skip_absent_pictures,
)
from ycore.trl.importance import absolute_gap, importance_ratio, stand_in
from ycore.trl.offload import Offload
from ycore.trl.packing import packs_pictures, path_of, use_segments
from ycore.types import Group, JsonObject, number_from


class RoundSource(Protocol):
    """Gives the trainer its rounds."""

    constraint_weights: list[float] | None
    """The cost of breaking each constraint in the last round; None without constraints."""
    effective_share: float
    """The last micro-batch's, see `importance.effective_share`."""

    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        """Sync the engines to the policy of this step, then return that many scored groups of this rank."""


class SeamGRPOTrainer(DurableTrainer, GRPOTrainer):
    """GRPOTrainer whose rounds come from a `RoundSource`. Set `rounds` before `train`.

    Args:
        advantage: replaces TRL's advantages; None keeps them.
        divergence: replaces TRL's KL term, see `importance.stand_in`.
    """

    rounds: RoundSource
    shares_device = False
    """Whether engines use the trainer's device in turn with it."""

    offload = "none"
    """The part of the state that leaves the device for a round, where engines share it; see `Offload`."""

    skips_equal_rewards = True
    """Whether a step of groups of equal rewards has no gradient; a critic and rewards of single tokens have one."""

    frozen_models: Sequence[nn.Module] = ()
    """Models that the trainer holds beside policy and reference."""

    open_image: Callable[[str], Any] | None = None
    """Opens an image by its sha256, where prompts have images."""

    num_logged = 0
    """Completions of a round of which `logged_completions` keeps the rows."""

    deals_groups = False
    """Whether micro-batches hold whole groups, whatever the loss's name says."""

    more_outputs: Sequence[str] = ()
    """Outputs of the loss's forward beside TRL's, which the model gives in calls with `with_more=True`."""

    has_gradient = True
    """Whether the step has one: a group of any rank with an advantage, or another term of the loss."""

    _buffered_inputs: Any
    _step: int
    vllm_importance_sampling_correction: bool

    def __init__(
        self,
        *args: Any,
        advantage: Estimator | None = None,
        divergence: str = "reverse-kl",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, rollout_func=self._return_round, **kwargs)
        self._advantage = advantage
        self._divergence = divergence
        models = [model for model in (self.model, self.ref_model) if model is not None]
        bare_models = [bare(self.accelerator.unwrap_model(model)) for model in models]
        self.packed_by = None if self.aux_loss_enabled else path_of(bare_models[0])
        """How the forward packs sequences: as `path_of` says, or None where TRL pads them."""
        self.packs_pictures = self.packed_by is not None and packs_pictures(bare_models[0])
        """Whether prompts with images are packed too."""
        self._groups: Sequence[Group] = ()
        self._round: list[FlatSequence] = []
        self.logged_completions: list[JsonObject] = []
        """The first completions of this rank's last round, by TRL's columns and what else is known of them."""
        self._rewards = torch.empty(0)
        self._micro_batch: Batch | None = None
        self._more: list[Tensor] = []  # `more_outputs`, (B, T) each
        self._last_loaded_step = -1
        # The compact head gives no gradient of the entropy.
        is_plain = not self._entropy_bonus_enabled and not self.args.cast_lm_head_to_fp32
        if (
            self.args.bf16
            and self.ref_model is not None
            and not (
                self.args.sync_ref_model or self.is_deepspeed_enabled or self.is_fsdp_enabled
            )
        ):
            # TRL loads it like the policy, whose weights in training are in float32.
            self.ref_model.to(torch.bfloat16)
        for model in bare_models:
            picture_ids = image_token_ids(model.config.to_dict())
            never_write(model, picture_ids)
            skip_absent_pictures(model, picture_ids)
            if self.packed_by == "segments":
                use_segments(model)
            if self.packed_by is not None and is_plain and needs_compact_head(self):
                add_compact_head(model, temperature=self.temperature)

    def room_for_engines(self) -> AbstractContextManager[None]:
        """Keep off the device what is to leave it, where engines share it."""
        if not self.shares_device:
            return nullcontext()
        return self._offloaded.away(self.optimizer, self.deepspeed)

    @cached_property
    def _offloaded(self) -> Offload:
        models = [self.model, *self.frozen_models]
        # A reference that follows the policy is not frozen.
        if self.ref_model is not None and not self.args.sync_ref_model:
            models.append(self.ref_model)
        return Offload(self.offload, models)

    def record(self, name: str, value: float) -> None:
        """Add a value to the step's metric `name`; TRL logs the mean of a step's values."""
        self._metrics["train" if self.model.training else "eval"][name].append(value)

    # -- position in the round ---------------------------------------------------------------------------------------

    @property
    def position(self) -> RoundPosition:
        """The part of the round that a checkpoint between two steps must hold."""
        is_in_use = self._step % self._uses_per_round != 0
        return RoundPosition(
            self._step, self.use_vllm, self._buffered_inputs if is_in_use else None
        )

    def resume_at(self, position: RoundPosition) -> None:
        """Continue from there; call it before `train`."""
        self._step = position.micro_step
        self.use_vllm = position.has_engine_logps
        self._buffered_inputs = send_to_device(position.micro_batches, self.accelerator.device)

    @property
    def _uses_per_round(self) -> int:
        """Micro-batches from one round to the next."""
        return int(self.args.steps_per_generation * self.num_iterations)

    @property
    def steps_per_round(self) -> int:
        """Optimizer steps from one round to the next."""
        return int(self._uses_per_round // self.args.gradient_accumulation_steps)

    @property
    def _learns_once(self) -> bool:
        """Whether the policy stays the same until the round's last use, so that its old log-probs are the new ones."""
        return bool(self.args.gradient_accumulation_steps % self._uses_per_round == 0)

    # -- the round -------------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[JsonObject]) -> Batch:
        """TRL calls it to generate a round and score it as one batch. ycore makes the round; TRL builds the batch."""
        step = self.state.global_step
        num_groups = len(inputs) // self.num_generations
        with self.room_for_engines():
            groups = self._groups = self.rounds.next_round(step=step, num_groups=num_groups)
        # What follows is the same whether the round was generated or read.
        self._seed_generators("round")
        self._round = flatten(groups, self.open_image)
        for sequence in self._round:
            for score in sequence.scores:
                for name, value in score.logged.items():
                    if not isinstance(value, str):
                        self.record(name, value)
        self.use_vllm = self._round[0].completion.logprobs is not None
        self._last_loaded_step = step  # TRL would sync its own engine otherwise
        rows = [sequence.row for sequence in self._round]
        texts = texts_stay_local(len(rows), logs_completions=self.log_completions)
        with self._correction_left_to_the_loss(), texts:
            batch: Batch = super()._generate_and_score_completions(rows)
        self._complete(batch, step)
        self.logged_completions = self._rows_to_log(batch)
        return batch

    def _rows_to_log(self, batch: Batch) -> list[JsonObject]:
        advantages = batch["advantages"][: self.num_logged].float()
        if advantages.ndim > 1:  # of tokens: their mean
            mask = loss_mask(batch)[: self.num_logged]
            advantages = (advantages * mask).sum(1) / mask.sum(1).clamp(min=1)
        rows: list[JsonObject] = []
        for advantage, sequence in zip(advantages.tolist(), self._round, strict=False):
            scores = sequence.scores
            rewards = [score.value for score in scores]
            logged = [item for score in scores for item in score.logged.items()]
            rows.append(
                {
                    "prompt": sequence.group.draw.prompt.content,
                    "completion": sequence.completion.transcript,
                    **dict(zip(self.reward_func_names, rewards, strict=True)),
                    "advantage": advantage,
                    "finish_reason": sequence.completion.finish_reason,
                    "problem": "; ".join(score.problem for score in scores if score.problem),
                    "verdict": "\n".join(score.verdict for score in scores if score.verdict),
                    "logged": "\n".join(f"{name}: {value}" for name, value in logged),
                }
            )
        return rows

    def _complete(self, batch: Batch, step: int) -> None:
        """Add to TRL's batch what ycore's forward and losses read."""
        device = self.accelerator.device
        self.has_gradient = self._some_rewards_differ()
        width = batch["completion_ids"].size(1)
        lengths = later_prompt_lengths(self._round, width)
        if lengths is not None:
            batch["later_prompt_lengths"] = lengths.to(device)
        batch |= self._replaced_advantages(batch)
        lags = batch["lags"] = token_lags(self._round, width, step=step).to(device)
        # It is in the batch for a resume within its round.
        batch["has_gradient"] = torch.full_like(lags[:, 0], self.has_gradient)
        self.record("ycore/staleness", gather(lags.amax(1)).float().mean().item())
        if "pixel_values" in batch:
            batch["images_hash"] = self._image_hashes().to(device)
        if not self._learns_once and "sampling_per_token_logps" in batch:
            self._record_gap(batch["old_per_token_logps"], batch)

    @contextmanager
    def _correction_left_to_the_loss(self) -> Iterator[None]:
        """TRL's importance weights cost a second forward; where the loss's own forward gives them, TRL skips it."""
        corrects = self.vllm_importance_sampling_correction
        self.vllm_importance_sampling_correction = corrects and not self._learns_once
        try:
            yield
        finally:
            self.vllm_importance_sampling_correction = corrects

    def _return_round(self, prompts: list[Any], trainer: Any) -> Batch:
        """TRL's `rollout_func`, which generates completions: ycore returns the round's."""
        masks = self._policy_masks()
        completions = [sequence.completion for sequence in self._round]
        logprobs = [list(completion.logprobs or ()) for completion in completions]
        return {
            "prompt_ids": [sequence.prompt_ids for sequence in self._round],
            "completion_ids": [list(completion.token_ids) for completion in completions],
            "logprobs": logprobs if self.use_vllm else None,
            **({"env_mask": masks} if masks else {}),  # TRL's `tool_mask`
        }

    def _calculate_rewards(
        self,
        inputs: list[Any],
        prompts: list[Any],
        completions: list[Any],
        completion_ids_list: list[Any],
    ) -> Tensor:
        """TRL calls it to run the reward functions, and gathers all ranks' rewards: ycore returns the round's."""
        rewards = [reward_values(sequence.scores) for sequence in self._round]
        self._rewards = gather(torch.tensor(rewards, device=self.accelerator.device).float())
        # TRL would take the sum for 0 where only rewards of weight 0 scored.
        is_unscored = self._weighted_sums(self._rewards).isnan()
        return self._rewards.masked_fill(is_unscored.unsqueeze(1), torch.nan)

    def _replaced_advantages(self, batch: Batch) -> dict[str, Tensor]:
        """Return what replaces TRL's advantages in the batch, and what else the loss needs; nothing keeps TRL's."""
        if self._advantage is None:
            return {}
        return {"advantages": self._estimated_advantages(self._advantage)}

    def _estimated_advantages(
        self, estimate: Estimator, *, among_N: Tensor | None = None
    ) -> Tensor:
        """This rank's advantages, (N,), from the weighted rewards of all ranks, or those `among_N` on each rank."""
        totals = self._totals(self._rewards)
        if among_N is not None:
            totals = totals.where(gather(among_N), torch.nan)
        totals_PG = totals.view(-1, self.num_generations)
        greedy_P = None
        if estimate.needs_greedy:
            greedy = [reward_values(group.greedy_scores_R or ()) for group in self._groups]
            greedy_P = self._totals(
                gather(torch.tensor(greedy, device=self.accelerator.device).float())
            )
        advantages_PG = estimate(totals_PG.nan_to_num(), ~totals_PG.isnan(), greedy_P=greedy_P)
        # An estimator may compare with more than the group.
        self.has_gradient = bool(advantages_PG.any())
        return self._of_this_rank(advantages_PG.flatten())

    def _of_this_rank(self, values: Tensor) -> Tensor:
        """The values of this rank's completions, (N,), among those of all ranks."""
        first = self.accelerator.process_index * len(self._round)
        return values[first : first + len(self._round)]

    def _some_rewards_differ(self) -> bool:
        """Whether any group of any rank has two rewards that differ, and so advantages by TRL's estimator."""
        size = self.num_generations
        if self.multi_objective_aggregation == "normalize_then_sum" and self._advantage is None:
            weights = self.reward_weights.tolist()
            sums = [
                normalized_sums(nan_to_none(rewards_GR), weights)
                for rewards_GR in self._rewards.view(-1, size, len(weights)).tolist()
            ]
        else:
            sums = nan_to_none(self._totals(self._rewards).view(-1, size).tolist())
        return any(rewards_differ(sums_G) for sums_G in sums)

    def _weighted_sums(self, rewards: Tensor) -> Tensor:
        """Weighted sums over the sources that gave a reward; NaN where none did. (N, R) -> (N,)."""
        return weighted_sums(rewards, self.reward_weights.to(rewards.device))

    def _totals(self, rewards: Tensor) -> Tensor:
        """The rewards of completions, (N,), that are compared with one another."""
        return self._weighted_sums(rewards)

    # -- micro-batches ---------------------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """TRL calls it for every micro-batch, and shuffles a new round: ycore deals whole groups, sorted by length."""
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        steps = self.args.steps_per_generation
        if self._step % self._uses_per_round == 0:
            batch = self._generate_and_score_completions(generation_batch)
            parts = split_tensor_dict(self._dealt(split_pixel_values_by_grid(batch)), steps)
            self._buffered_inputs = [unsplit_pixel_values_by_grid(part) for part in parts]
        if self._step % self.args.gradient_accumulation_steps == 0:
            self._seed_generators("step")
        return self._buffered_inputs[self._step % steps]

    def _seed_generators(self, use: str) -> None:
        """Seed every generator for each round and step by seed, step and rank, so that a resumed run is the same.

        Restoring their states is not enough: a round that is generated draws from them, and one that is read does not.
        """
        step = self.state.global_step
        rank = self.accelerator.process_index
        set_seed(number_from(f"{use}/{self.args.seed}/{step}/{rank}", bits=32))

    def _dealt(self, batch: Batch) -> Batch:
        """The batch in the order of its micro-batches."""
        # Losses that depend on who shares a micro-batch keep TRL's own random ones.
        depends_on_batch = self.loss_type == "bnpo" or self.top_entropy_quantile < 1.0
        if (depends_on_batch or self._entropy_bonus_enabled) and not self.deals_groups:
            shuffled: Batch = shuffle_sequence_dict(batch)
            return shuffled
        args = self.args
        size = self.num_generations
        indices = deal(
            batch["completion_mask"].sum(dim=1).view(-1, size).sum(dim=1).tolist(),
            group_size=size,
            num_windows=max(1, args.steps_per_generation // args.gradient_accumulation_steps),
            seed=args.seed + self.state.global_step,
        )
        order = torch.tensor(indices)

        def ordered(value: Any) -> Any:
            if isinstance(value, list):
                return [value[index] for index in indices]
            return value[order] if value.ndim > 0 else value

        return {key: ordered(value) for key, value in batch.items()}

    # -- forward and loss ------------------------------------------------------------------------------------------

    @property
    def _may_skip(self) -> bool:
        """Whether the ranks need no forward to add up gradients that are zero."""
        steps_are_within_rounds = (
            self._uses_per_round % self.args.gradient_accumulation_steps == 0
        )
        return steps_are_within_rounds and not (
            self.is_deepspeed_enabled or self.is_fsdp_enabled
        )

    def _compute_loss(self, model: nn.Module, inputs: Batch) -> Tensor:
        """TRL computes the loss from the batch; ycore lets its forward fill in the correction and the reference.

        Where no group has an advantage, the gradient is zero without a forward; the optimizer's step is what it would
        be.
        """
        has_other_terms = (
            self.beta != 0.0 or self._entropy_bonus_enabled or self.aux_loss_enabled
        )
        self.has_gradient = (
            has_other_terms
            or not self.skips_equal_rewards
            or bool(inputs["has_gradient"].any())
        )
        self.record("ycore/skipped", float(not self.has_gradient))
        if not self.has_gradient and self._may_skip:
            weights = (weight for weight in model.parameters() if weight.requires_grad)
            return torch.stack([weight.flatten()[:0].sum() for weight in weights]).sum().float()
        # A copy: the buffer keeps the round's values for the next use.
        self._micro_batch = dict(inputs)
        try:
            return self._batch_loss(model, self._micro_batch)
        finally:
            self._micro_batch = None

    def _batch_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = super()._compute_loss(model, batch)
        return loss

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """TRL calls it for every forward, on padded rows (B, P + T): ycore packs them, where the model allows it."""
        has_images = kwargs.get("pixel_values") is not None
        if self.packed_by is None or (has_images and not self.packs_pictures):
            inherited = super()._get_per_token_logps_and_entropies
            logps, entropies, aux_loss = inherited(
                model, input_ids, attention_mask, logits_to_keep, **kwargs
            )
        else:
            wanted, later_prompts = self._wanted_and_later_prompts(logits_to_keep)
            rows = PaddedRows(
                input_ids, attention_mask, logits_to_keep, wanted, later_prompts,
                self._pictures(kwargs) if has_images else None,
            )  # fmt: skip
            aux_loss = None
            more = () if self._micro_batch is None else self.more_outputs
            arguments = {"with_more": True} if more else {}
            with self.accelerator.autocast():
                logps, entropies, *self._more = packed_scores(
                    model,
                    rows,
                    path=self.packed_by,
                    names=("log_probs", "entropy", *more),
                    size=kwargs.get("batch_size"),
                    **arguments,
                )
        if self._micro_batch is not None:
            self._fill_in(self._micro_batch, logps)
        return logps, entropies, aux_loss

    def _pictures(self, passed: Batch) -> Pictures:
        """The images of the sequences in a forward, by what TRL passes to it beside their tokens."""
        pixels = passed["pixel_values"].split(passed["num_images"])
        batch = self._micro_batch
        hashes = self._image_hashes() if batch is None else batch["images_hash"]
        return Pictures(pixels, hashes.tolist())

    def _image_hashes(self) -> Tensor:
        return torch.tensor([sequence.images_hash for sequence in self._round])

    def _wanted_and_later_prompts(self, width: int) -> tuple[Tensor | None, Tensor | None]:
        """The policy's tokens, (B, T), and `later_prompt_lengths`, of the micro-batch in the loss or of the round.

        Log-probabilities at other tokens stay 0 in both: of a real one and a 0, the ratio could be infinite, and no
        mask helps.
        """
        if self._micro_batch is not None:
            batch = self._micro_batch
            return batch.get("tool_mask"), batch.get("later_prompt_lengths")
        masks = self._policy_masks()
        padded = masks and torch.tensor([[*mask, *[1] * (width - len(mask))] for mask in masks])
        return padded, later_prompt_lengths(self._round, width)

    def _policy_masks(self) -> list[list[int]] | None:
        """1 at the policy's tokens of each of the round's sequences; None where all tokens are the policy's."""
        if not any(sequence.completion.turns for sequence in self._round):
            return None
        return [list(sequence.completion.mask) for sequence in self._round]

    def _fill_in(self, inputs: Batch, logps: Tensor) -> None:
        """Give the loss what depends on its own forward: the importance weights, and the reference's stand-in."""
        if "sampling_per_token_logps" in inputs and self._learns_once:
            if self.vllm_importance_sampling_correction:
                self._fill_in_correction(inputs, logps.detach())
            self._record_gap(logps.detach(), inputs)
        if "ref_per_token_logps" in inputs:
            reference = inputs["ref_per_token_logps"]
            inputs["ref_per_token_logps"] = stand_in(self._divergence, logps, reference)

    def _fill_in_correction(self, inputs: Batch, logps: Tensor) -> None:
        """Give the loss the importance weights that the batch was built without."""
        mask = loss_mask(inputs)
        ratio = importance_ratio(
            logps,
            inputs["sampling_per_token_logps"],
            mask,
            mode=self.vllm_importance_sampling_mode,
            clip_min=self.vllm_importance_sampling_clip_min,
            clip_max=self.vllm_importance_sampling_clip_max,
        )
        inputs["importance_sampling_ratio"] = ratio
        weights = ratio if ratio.size(1) == 1 else ratio[mask.bool()]
        if weights.numel():
            self.record("sampling/importance_sampling_ratio/mean", weights.mean().item())

    def _record_gap(self, logps: Tensor, inputs: Batch) -> None:
        """The mean gap between engine and trainer: on the same weights, and on those of an earlier version."""
        is_fresh = inputs["lags"] == 0
        for name, counted in (("ycore/logprob_gap", is_fresh), ("ycore/stale_gap", ~is_fresh)):
            mask = loss_mask(inputs) * counted
            gap = absolute_gap(logps, inputs["sampling_per_token_logps"], mask)
            if gap.numel():
                self.record(name, gap.mean().item())


@contextmanager
def texts_stay_local(num_sequences: int, *, logs_completions: bool) -> Iterator[None]:
    """TRL gathers every prompt and completion of all ranks for its table of completions; without one, it need not.

    Args:
        num_sequences: of this rank; a list of that length is taken for texts and not gathered.
        logs_completions: TRL's `log_completions`: whether the table is wanted.
    """
    gather_object = grpo_trainer.gather_object

    def gather_unless_texts(items: list[Any]) -> list[Any]:
        gathered: list[Any] = items if len(items) == num_sequences else gather_object(items)
        return gathered

    if not logs_completions:
        grpo_trainer.gather_object = gather_unless_texts
    try:
        yield
    finally:
        grpo_trainer.gather_object = gather_object


def nan_to_none(rewards: list[list[float]]) -> list[list[float | None]]:
    """Return the rewards with None in place of NaN."""
    return [[None if math.isnan(reward) else reward for reward in row] for row in rewards]
