"""One micro-batch through the policy: every shared prompt once, hardly any padding, logits of completions only.

`score_completions` takes the padded tensors that TRL builds and returns what TRL's own method returns, up to rounding.
`add_compact_head` is for devices without Triton: there TRL's fused head scores every position, prompts and padding
included, and repeats the projection in its backward. `score_tokens` projects only the wanted positions, in tiles.
"""

import functools
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from trl.trainer.utils import FusedCausalLMOutput

IGNORE = -100
TILE = 512
"""Tokens projected at a time: a tile of 512 x 49,152 float32 logits is 100 MB."""

_MASKED_ATTENTION = ("sdpa", "eager")
_LOGIT_TRANSFORMS = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier",
)


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a forward pass, in units of one token through the linear layers."""

    attention_per_pair: float  # of one query-key pair, over all layers

    def of_rows(self, num_rows: int, length: int) -> float:
        """`num_rows` rows padded to `length` tokens."""
        return num_rows * length * (1.0 + self.attention_per_pair * length)


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt and some of its completions: `members` are indices of sequences, `length` is in tokens."""

    members: tuple[int, ...]
    length: int


def plan_rows(
    prompts: Sequence[tuple[int, ...]], completion_lengths: Sequence[int], *, cost: Cost, share: bool = True
) -> list[Row]:
    """The cheapest rows for a micro-batch: few long ones compute little twice, many short ones pad little.

    Args:
        prompts: token ids of each sequence's prompt; equal prompts may share a row.
        completion_lengths: tokens of each sequence's completion.
        share: False gives every sequence its own row.
    """
    groups = group_by_prompt(prompts) if share else [[index] for index in range(len(prompts))]
    plans = [
        [row for members in groups for row in _split(members, num_parts, prompts, completion_lengths)]
        for num_parts in _part_counts(max(len(members) for members in groups))
    ]
    return min(plans, key=lambda rows: cost.of_rows(len(rows), max(row.length for row in rows)))


def group_by_prompt(prompts: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Indices with equal prompts, in order of first appearance."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(index)
    return list(groups.values())


def _part_counts(largest_group: int) -> list[int]:
    counts = []
    while largest_group > 1:
        counts.append(largest_group)
        largest_group = (largest_group + 1) // 2
    return [*counts, 1]


def _split(
    members: Sequence[int], num_parts: int, prompts: Sequence[tuple[int, ...]], completion_lengths: Sequence[int]
) -> list[Row]:
    """One group over at most `num_parts` rows of about equal length: longest first, each to the shortest row."""
    # A row holds the prompt without its last token. Every completion repeats that token as its own first input, from
    # which it predicts its first token.
    shared = len(prompts[members[0]]) - 1
    parts: list[list[int]] = [[] for _ in range(min(num_parts, len(members)))]
    lengths = [shared] * len(parts)
    for index in sorted(members, key=lambda member: -completion_lengths[member]):
        shortest = lengths.index(min(lengths))
        parts[shortest].append(index)
        lengths[shortest] += completion_lengths[index]
    # Masked completions have no tokens, so a part may stay empty.
    return [Row(tuple(sorted(part)), length) for part, length in zip(parts, lengths, strict=True) if part]


def attention_cost(config: PretrainedConfig) -> Cost:
    """Attention takes 4 h flops per pair and layer, the linear layers 2 flops per parameter and token."""
    text = config.get_text_config()
    hidden, layers = text.hidden_size, text.num_hidden_layers
    linear = layers * (4 * hidden * hidden + 3 * hidden * text.intermediate_size)
    return Cost(attention_per_pair=4 * hidden * layers / (2 * linear))


def can_pack(config: PretrainedConfig) -> bool:
    """Whether the model takes our mask and positions: it must use plain full attention, in every layer."""
    text = config.get_text_config()
    layer_types = set(text.layer_types) if "layer_types" in text and text.layer_types else {"full_attention"}
    windowed = "sliding_window" in text and text.sliding_window is not None and layer_types != {"full_attention"}
    return config._attn_implementation in _MASKED_ATTENTION and layer_types == {"full_attention"} and not windowed


def score_completions(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    completion_width: int,
    *,
    cost: Cost,
    share: bool = True,
    batch_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token log-probabilities and entropies, in nats, of the completions.

    Args:
        model: the policy, wrapped or not, with a fused head (`add_compact_head` or TRL's).
        input_ids, attention_mask: (B, P + T), prompts padded left and completions padded right.
        completion_width: T.
        share: whether equal prompts may share a row.
        batch_size: sequences per forward; None takes all at once.

    Returns:
        Two (B, T) float32 tensors, zero at padding.
    """
    per_pass = batch_size or len(input_ids)
    logps: list[torch.Tensor] = []
    entropies: list[torch.Tensor] = []
    for ids, mask in zip(input_ids.split(per_pass), attention_mask.split(per_pass), strict=True):
        prompts, completions = _unpad(ids, mask, completion_width)
        rows = plan_rows(prompts, [len(completion) for completion in completions], cost=cost, share=share)
        inputs, source = pack(rows, prompts, completions, completion_width, ids.device)
        outputs = model(**inputs, fused_lm_head=True, use_cache=False)
        wanted = inputs["shift_labels"] != IGNORE
        for scores, found in ((logps, outputs.log_probs), (entropies, outputs.entropy)):
            flat = torch.zeros(len(ids) * completion_width, dtype=found.dtype, device=found.device)
            scores.append(flat.scatter(0, source[wanted], found[wanted]).view(len(ids), completion_width))
    return torch.cat(logps), torch.cat(entropies)


def pack(
    rows: list[Row],
    prompts: list[tuple[int, ...]],
    completions: list[tuple[int, ...]],
    completion_width: int,
    device: torch.device,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Lay out a row as its prompt without the last token, then for each member that token and its completion.

    A completion's last token predicts nothing, so it is left out. Members do not see each other.

    Returns:
        The model's inputs, (R, L) for R rows of up to L tokens, with a mask (R, 1, L, L) that is True where a query may
        see a key, and labels of `IGNORE` where no token is wanted; and the (R, L) flat indices of the labels in (B, T).
    """
    shape = (len(rows), max(1, *(row.length for row in rows)))
    ids, positions = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    labels, source = torch.full(shape, IGNORE), torch.zeros(shape, dtype=torch.long)
    # Padding sees itself: softmax over an empty row of the mask would divide by zero.
    attention = torch.eye(shape[1], dtype=torch.bool).repeat(shape[0], 1, 1)
    causal = torch.ones(shape[1], shape[1], dtype=torch.bool).tril()
    for r, row in enumerate(rows):
        prompt = prompts[row.members[0]]
        shared = len(prompt) - 1
        ids[r, :shared] = torch.tensor(prompt[:-1], dtype=torch.long)
        positions[r, :shared] = torch.arange(shared)
        attention[r, :shared, :shared] = causal[:shared, :shared]
        start = shared
        for index in row.members:
            completion = completions[index]
            end = start + len(completion)
            ids[r, start:end] = torch.tensor((prompt[-1], *completion[:-1]))
            positions[r, start:end] = torch.arange(shared, shared + len(completion))
            labels[r, start:end] = torch.tensor(completion)
            source[r, start:end] = index * completion_width + torch.arange(len(completion))
            attention[r, start:end, :shared] = True
            attention[r, start:end, start:end] = causal[: len(completion), : len(completion)]
            start = end
    inputs = {
        "input_ids": ids,
        "position_ids": positions,
        "attention_mask": attention.unsqueeze(1),
        "shift_labels": labels,
    }
    return {name: tensor.to(device) for name, tensor in inputs.items()}, source.to(device)


def _unpad(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, completion_width: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Token ids of every prompt and completion, without padding."""
    split = input_ids.size(1) - completion_width
    keep, ids = attention_mask.bool().cpu(), input_ids.cpu()
    prompts = [tuple(row[:split][mask[:split]].tolist()) for row, mask in zip(ids, keep, strict=True)]
    completions = [tuple(row[split:][mask[split:]].tolist()) for row, mask in zip(ids, keep, strict=True)]
    return prompts, completions


def add_compact_head(model: PreTrainedModel, *, temperature: float) -> None:
    """Let `score_tokens` answer the calls with `fused_lm_head=True`, on the labelled positions only.

    Args:
        model: transformers' own, which DDP, DeepSpeed, FSDP and peft all call in the end. TRL has patched it with its
            fused head, which still serves other calls, and models that scale or cap their logits.
        temperature: the logits are divided by it.
    """
    text = model.config.get_text_config().to_dict()
    if any(text.get(key) is not None for key in _LOGIT_TRANSFORMS):
        return
    trl_forward = model.forward

    @functools.wraps(type(model).forward)  # `generate` looks at the signature
    def forward(self: PreTrainedModel, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head or kwargs.get("shift_labels") is None:
            return trl_forward(*args, fused_lm_head=fused_lm_head, **kwargs)
        labels = kwargs.pop("shift_labels")
        hidden = self.base_model(*args, **kwargs).last_hidden_state
        head = self.get_output_embeddings()
        wanted = labels != IGNORE
        logps, entropies = score_tokens(hidden[wanted], head.weight, head.bias, labels[wanted], temperature=temperature)
        empty = torch.zeros(labels.shape, dtype=logps.dtype, device=logps.device)
        return FusedCausalLMOutput(
            log_probs=empty.masked_scatter(wanted, logps), entropy=empty.masked_scatter(wanted, entropies)
        )

    model.forward = types.MethodType(forward, model)


def score_tokens(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, *, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of its distribution.

    Args:
        hidden: (N, H) states, each just before its target.
        weight: (V, H) output embedding; `bias`: (V,) or None.
        targets: (N,) token ids.
        temperature: the logits are divided by it.

    Returns:
        (N,) float32 log-probabilities, with gradient, and (N,) float32 entropies in nats, without.
    """
    if torch.is_grad_enabled() and not weight.requires_grad and hidden.requires_grad:
        logps, entropies = _FrozenHead.apply(hidden, weight, bias, targets, temperature)
        return logps, entropies
    tiles = [
        checkpoint(_score_tile, states, weight, bias, ids, temperature, use_reentrant=False)
        for states, ids in zip(hidden.split(TILE), targets.split(TILE), strict=True)
    ]
    logps = torch.cat([logp for logp, _ in tiles])
    return logps, torch.cat([entropy for _, entropy in tiles])


def _log_softmax(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float
) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return torch.log_softmax(logits / temperature, dim=-1)


def _score_tile(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = _log_softmax(hidden, weight, bias, temperature)
    entropy = -(log_p.detach().exp() * log_p.detach()).sum(-1)
    return log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


class _FrozenHead(torch.autograd.Function):
    """d logp / d hidden = (weight[target] - softmax @ weight) / temperature, known as soon as the softmax is.

    With the gradient computed in the forward, tile by tile, each product with the vocabulary is done once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logps, entropies, slopes = [], [], []
        for states, ids in zip(hidden.split(TILE), targets.split(TILE), strict=True):
            log_p = _log_softmax(states, weight, bias, temperature)
            probabilities = log_p.exp()
            logps.append(log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1))
            entropies.append(-(probabilities * log_p).sum(-1))
            expected = probabilities.to(weight.dtype) @ weight
            slopes.append((weight[ids] - expected) / temperature)
        ctx.save_for_backward(torch.cat(slopes))
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logps), entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return grads[0].unsqueeze(-1).to(slopes.dtype) * slopes, None, None, None, None
