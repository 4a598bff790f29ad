"""The private members of TRL that rounds and losses touch, in one class, held to TRL 1.16 by a contract test.

TRL builds the batch, computes advantages and losses, and trains. Four of its methods are wrapped:

    _generate_and_score_completions   run our round first, then let TRL work on its rows
    _calculate_rewards                answer with the rewards the round earned
    _prepare_inputs                   deal the round into micro-batches by length instead of at random
    _get_per_token_logps_and_entropies   one packed forward instead of a padded one

and `_compute_loss` is told of the micro-batch it works on, so that the correction for the engine's probabilities can
use the log-probabilities of the training forward itself: the policy has not moved since the round, so TRL's second
forward over the whole batch would compute the same numbers again. From the same forward comes the reference that turns
TRL's KL term into another divergence (`divergence.stand_in`).

TRL without vLLM, which it imports wherever it is installed, for generation that ycore leaves to engines of its own.

TRL's gathers of text, bounded: its trainer collects every prompt and completion of all ranks on every rank.

Not here: those that checkpoints touch (`durable`, `whole_checkpoints`), where rounds come from (`controller`) and how a
trainer process is set up (`roles.trainer`).
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from accelerate.utils import gather, set_seed
from transformers.integrations import is_deepspeed_zero3_enabled
from trl.trainer import grpo_trainer
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

from ycore.trl.advantages import Estimator
from ycore.trl.batches import FlatSequence, absolute_gap, deal, importance_ratio, sequences_of
from ycore.trl.checkpointing import DurableTrainer
from ycore.trl.divergence import stand_in
from ycore.trl.forward import add_compact_head, attention_cost, can_pack, score_completions
from ycore.trl.offload import optimizer_away
from ycore.types import Group


def leave_out_vllm() -> None:
    """From now on TRL finds no vLLM; to be called before a trainer of TRL is imported."""
    from trl import import_utils

    import_utils.is_vllm_available = _no_vllm


def _no_vllm(min_version: str | None = None) -> bool:
    return False


@contextmanager
def texts_stay_local(num_sequences: int, *, logs_completions: bool) -> Iterator[None]:
    """While it lasts, TRL gathers no list that has one item for each of this rank's `num_sequences`."""
    gather_object = grpo_trainer.gather_object

    def gather_names(items: list[Any]) -> list[Any]:
        if len(items) == num_sequences:
            return items
        gathered: list[Any] = gather_object(items)
        return gathered

    if logs_completions:
        yield
        return
    grpo_trainer.gather_object = gather_names
    try:
        yield
    finally:
        grpo_trainer.gather_object = gather_object


class RoundSource(Protocol):
    """Where the trainer's rounds come from."""

    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        """Sync the engines to the policy of this step, then return that many scored groups of this rank."""


class SeamGRPOTrainer(DurableTrainer):
    """GRPOTrainer whose rounds come from a `RoundSource`. Set `rounds` before `train`.

    Where `shares_device`, the optimizer's state is away while a round is made.
    """

    rounds: RoundSource
    shares_device = False
    _buffered_inputs: Any

    def __init__(
        self, *args: Any, advantage: Estimator | None = None, divergence: str = "reverse-kl", **kwargs: Any
    ) -> None:
        super().__init__(*args, rollout_func=self._answer_rollouts, **kwargs)
        base = self.accelerator.unwrap_model(self.model)
        config = base.config
        self._advantage = advantage
        self._divergence = divergence
        self._cost = attention_cost(config)
        self._packs = can_pack(config) and not self.aux_loss_enabled
        self._round: list[FlatSequence] = []
        self._rewards = torch.empty(0)
        self._micro_batch: dict[str, Any] | None = None
        self._last_loaded_step = -1
        # Our head gives no gradient of the entropy and computes in the head's own dtype; TRL's does what is asked.
        # Nor does ours gather a head that is cut up over the ranks.
        is_plain = not self._entropy_bonus_enabled and not self.args.cast_lm_head_to_fp32
        is_whole = not is_deepspeed_zero3_enabled() and not self.is_fsdp_enabled
        if self._packs and is_plain and is_whole and not _has_triton_kernel(self.accelerator.device):
            for model in filter(None, (self.model, self.ref_model)):
                add_compact_head(_innermost(model), temperature=self.temperature)

    @property
    def bare_model(self) -> Any:
        """The policy without wrappers: transformers' model, or peft's around it."""
        return self.accelerator.unwrap_model(self.model)

    def room_for_engines(self) -> AbstractContextManager[None]:
        """Around whatever engines on this device are asked."""
        return optimizer_away(self.optimizer, self.deepspeed) if self.shares_device else nullcontext()

    # -- the round -------------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        step = self.state.global_step
        with self.room_for_engines():
            groups = self.rounds.next_round(step=step, num_groups=len(inputs) // self.num_generations)
        self._seed_generators("round")  # what follows is the same, whether the round was generated or read
        self._round = [sequence for group in groups for sequence in sequences_of(group)]
        self.use_vllm = self._round[0].logprobs is not None
        self._last_loaded_step = step  # the round has just synced; TRL must not ask for it again
        texts = texts_stay_local(len(self._round), logs_completions=self.log_completions)
        with self._correcting_later(), texts:
            batch: dict[str, Any] = super()._generate_and_score_completions([seq.row for seq in self._round])
        if self._advantage is not None:
            batch["advantages"] = self._estimated_advantages(self._advantage)
        batch["is_fresh"] = self._written_by_this_policy()
        if not self._one_step_a_round and "sampling_per_token_logps" in batch:
            self._record_gap(batch["old_per_token_logps"], batch)
        return batch

    def _written_by_this_policy(self) -> torch.Tensor:
        """Which sequences are of the round's newest version: what is left over from earlier rounds is not."""
        versions = torch.tensor([sequence.policy_version for sequence in self._round], device=self.accelerator.device)
        return versions == versions.max()

    @property
    def _one_step_a_round(self) -> bool:
        """Whether the policy stands still from the round to its last use, so that old logprobs are the new ones."""
        steps_per_round = self.args.steps_per_generation * self.num_iterations
        return bool(self.args.gradient_accumulation_steps % steps_per_round == 0)

    def _correcting_later(self) -> "_Switch":
        """TRL's correction off while the batch is built, where the training forward can give it for nothing."""
        return _Switch(self, off=self._one_step_a_round)

    def _answer_rollouts(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        has_logprobs = self._round[0].logprobs is not None
        return {
            "prompt_ids": [sequence.prompt_ids for sequence in self._round],
            "completion_ids": [sequence.completion_ids for sequence in self._round],
            "logprobs": [sequence.logprobs for sequence in self._round] if has_logprobs else None,
        }

    def _calculate_rewards(
        self, inputs: list[Any], prompts: list[Any], completions: list[Any], completion_ids_list: list[Any]
    ) -> torch.Tensor:
        rewards = torch.tensor([sequence.rewards for sequence in self._round], device=self.accelerator.device)
        self._rewards = gather(rewards.float())
        return self._rewards

    def _estimated_advantages(self, estimate: Estimator) -> torch.Tensor:
        """Another estimator's advantages in place of TRL's, from the same weighted rewards of all ranks."""
        totals_PG = self._totals(self._rewards).view(-1, self.num_generations)
        greedy_P = None
        if estimate.needs_greedy:
            first_of_groups = self._round[:: self.num_generations]
            greedy = torch.tensor([one.greedy_rewards for one in first_of_groups], device=self.accelerator.device)
            greedy_P = self._totals(gather(greedy.float()))
        advantages = estimate(totals_PG.nan_to_num(), ~totals_PG.isnan(), greedy_P=greedy_P).flatten()
        first = self.accelerator.process_index * len(self._round)
        return advantages[first : first + len(self._round)]

    def _totals(self, rewards: torch.Tensor) -> torch.Tensor:
        """Weighted sums over the sources that answered; NaN where none did. (N, R) -> (N,)."""
        totals = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        return totals.masked_fill(rewards.isnan().all(dim=1), float("nan"))

    # -- micro-batches ---------------------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        steps = self.args.steps_per_generation
        if self._step % (steps * self.num_iterations) == 0:
            batch = self._generate_and_score_completions(generation_batch)
            self._buffered_inputs = split_tensor_dict(self._dealt(batch), steps)
        if self._step % self.args.gradient_accumulation_steps == 0:
            self._seed_generators("step")
        return self._buffered_inputs[self._step % steps]

    def _seed_generators(self, use: str) -> None:
        """Every generator anew for each round and each step, from seed, step and rank: a resumed run finds them so.

        Restoring their states is not enough: generation draws from them, and a round that is read draws nothing.
        """
        identity = f"{use}/{self.args.seed}/{self.state.global_step}/{self.accelerator.process_index}"
        set_seed(int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=4).digest(), "big"))

    @property
    def _measures_micro_batches(self) -> bool:
        """Whether the loss depends on who shares a micro-batch: then TRL's own random micro-batches are kept."""
        return bool(self.loss_type == "bnpo" or self.top_entropy_quantile < 1.0 or self._entropy_bonus_enabled)

    def _dealt(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self._measures_micro_batches:
            shuffled: dict[str, Any] = shuffle_sequence_dict(batch)
            return shuffled
        size = self.num_generations
        tokens = batch["completion_mask"].sum(dim=1).view(-1, size).sum(dim=1).tolist()
        windows = max(1, self.args.steps_per_generation // self.args.gradient_accumulation_steps)
        batches = deal(
            tokens,
            group_size=size,
            per_batch=self.args.per_device_train_batch_size,
            num_windows=windows,
            seed=self.args.seed + self.state.global_step,
        )
        order = torch.tensor([index for indices in batches for index in indices])
        return {key: value[order] if value.ndim > 0 else value for key, value in batch.items()}

    # -- forward and loss ------------------------------------------------------------------------------------------

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        self._micro_batch = dict(inputs)  # what is filled in holds for this forward; the buffer keeps the round's
        try:
            loss: torch.Tensor = super()._compute_loss(model, self._micro_batch)
        finally:
            self._micro_batch = None
        return loss

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        score = self._score_packed if self._packs else super()._get_per_token_logps_and_entropies
        logps, entropies, aux_loss = score(model, input_ids, attention_mask, logits_to_keep, **kwargs)
        if self._micro_batch is not None:
            self._fill_in_correction(self._micro_batch, logps.detach())
            if "ref_per_token_logps" in self._micro_batch:
                reference = self._micro_batch["ref_per_token_logps"]
                self._micro_batch["ref_per_token_logps"] = stand_in(self._divergence, logps, reference)
        return logps, entropies, aux_loss

    def _score_packed(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *,
        batch_size: int | None = None,
        **ignored: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        per_pass = batch_size or len(input_ids)
        parts = []
        for ids, mask in zip(input_ids.split(per_pass), attention_mask.split(per_pass), strict=True):
            with self.accelerator.autocast():
                parts.append(score_completions(model, ids, mask, logits_to_keep, cost=self._cost))
        return torch.cat([logps for logps, _ in parts]), torch.cat([entropies for _, entropies in parts]), None

    def _fill_in_correction(self, inputs: dict[str, Any], logps: torch.Tensor) -> None:
        """Give the loss its importance weights, where they were left for this forward to find, and record the gap."""
        sampled = inputs.get("sampling_per_token_logps")
        if sampled is None or not self._one_step_a_round:
            return
        mask = inputs["completion_mask"]
        if self.vllm_importance_sampling_correction:
            ratio = importance_ratio(
                logps,
                sampled,
                mask,
                mode=self.vllm_importance_sampling_mode,
                clip_min=self.vllm_importance_sampling_clip_min,
                clip_max=self.vllm_importance_sampling_clip_max,
            )
            inputs["importance_sampling_ratio"] = ratio
            weights = ratio if ratio.size(1) == 1 else ratio[mask.bool()]
            if weights.numel():
                self.record("sampling/importance_sampling_ratio/mean", weights.mean().item())
        self._record_gap(logps, inputs)

    def _record_gap(self, logps: torch.Tensor, inputs: dict[str, Any]) -> None:
        """How far engine and trainer are apart on the same weights, so over fresh sequences alone."""
        mask = inputs["completion_mask"] * inputs["is_fresh"].unsqueeze(1)
        gap = absolute_gap(logps, inputs["sampling_per_token_logps"], mask)
        if gap.numel():
            self.record("ycore/logprob_gap", gap.mean().item())

    # -- metrics ---------------------------------------------------------------------------------------------------

    def record(self, name: str, value: float) -> None:
        """Add a value to the step's metric `name`; TRL logs the mean of a step's values."""
        self._metrics["train" if self.model.training else "eval"][name].append(value)


class _Switch:
    """`vllm_importance_sampling_correction`, off while the batch is built, when the loss will do it instead."""

    def __init__(self, trainer: SeamGRPOTrainer, *, off: bool) -> None:
        self._trainer, self._off = trainer, off
        self._before: bool = trainer.vllm_importance_sampling_correction

    def __enter__(self) -> None:
        self._trainer.vllm_importance_sampling_correction = self._before and not self._off

    def __exit__(self, *exception: object) -> None:
        self._trainer.vllm_importance_sampling_correction = self._before


def placeholder_rewards(names: Sequence[str]) -> list[Callable[..., list[float]]]:
    """One named function per reward source, for TRL's bookkeeping; it is never called."""
    return [_named(name) for name in names]


def _named(name: str) -> Callable[..., list[float]]:
    def answered_by_the_round(**columns: Any) -> list[float]:
        raise AssertionError(f"reward {name!r} is earned in the round, not asked by TRL")

    answered_by_the_round.__name__ = name
    return answered_by_the_round


def _innermost(model: torch.nn.Module) -> Any:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # peft adds the method
    return base


def _has_triton_kernel(device: torch.device) -> bool:
    return device.type in ("cuda", "xpu")
