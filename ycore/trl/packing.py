"""Packed rows: every shared prompt of a micro-batch once, no padding, no mask.

The sequences of a micro-batch are laid end to end in one row. Sequences with equal prompts share a block: the prompt
without its last token, then for each member that token and its completion. From the prompt's last token a completion
predicts its first token, so each member needs a copy of its own.

    [ prompt[:-1] | prompt[-1] completion_1[:-1] | prompt[-1] completion_2[:-1] | ... ] [ next block ] ...

Attention is computed segment by segment: a completion sees its block's prompt and itself. A dense mask would hold
L x L entries for a row of L tokens, and attention would be computed between all of them.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

IGNORE = -100
SEGMENTS = "ycore_segments"
"""The name of `segment_attention` among transformers' attention implementations."""

WHOLE = 512
"""Tokens of a block up to which one call with a mask is faster than a call for each of its sequences."""

WIDENED = 256
"""Queries of a call up to which float32 is the faster on cores, where the backward of bfloat16 is slow."""

_FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")


@dataclass
class Block:
    """Sequences that share a prompt."""

    members: tuple[int, ...]  # indices of sequences
    shared: int  # prompt tokens that are in the row once
    lengths: tuple[int, ...]  # tokens of each member after those, as many as its completion has

    @property
    def size(self) -> int:
        return self.shared + sum(self.lengths)


class Segments:
    """Where the blocks of a row lie, in order. No dataclass: FSDP2 hands a copy of those to each module in bfloat16.

    Attributes:
        num_served: the layers that computed attention by it.
        masks: by a short block's start: its mask, (L, L), made once for all layers.
    """

    def __init__(self, blocks: list[Block]) -> None:
        self.blocks = blocks
        self.num_served = 0
        self.masks: dict[int, Tensor] = {}


def path_of(model: PreTrainedModel) -> str | None:
    """How the model's attention can be packed: "segments", "varlen" (flash attention), or None.

    Packing needs full attention in every layer, computed by one of transformers' attention functions.
    """
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or [
        "full_attention"
    ]
    if set(layer_types) != {"full_attention"} or not model._can_set_attn_implementation():
        return None
    attention = model.config._attn_implementation
    if attention in _FLASH or "flash-attn" in attention:
        return "varlen"
    return "segments" if attention in ("sdpa", SEGMENTS) else None


def packs_pictures(model: PreTrainedModel) -> bool:
    """Whether a packed row may have images: one row of pixels each, in the order of their tokens, with plain positions
    and a causal mask. LLaVA's family is tested for it; the others are padded."""
    return str(model.config.model_type) == "llava"


def use_segments(model: PreTrainedModel) -> None:
    """Let the model compute attention by segments in calls with `segments=...`; other calls are as before (sdpa).

    A vision tower's own attention stays what it is.
    """
    AttentionInterface.register(SEGMENTS, segment_attention)
    AttentionMaskInterface.register(SEGMENTS, sdpa_mask)
    sees = model.config.get_text_config() is not model.config
    model.set_attn_implementation({"text_config": SEGMENTS} if sees else SEGMENTS)


def plan_blocks(
    prompts: Sequence[tuple[int, ...]],
    completions: Sequence[tuple[int, ...]],
    *,
    share: bool,
    images_hashes: Sequence[int] | None = None,
) -> list[Block]:
    """The blocks of a row; sequences without completion tokens, which are masked out, are left out.

    Args:
        share: False gives every sequence a block of its own.
        images_hashes: one per sequence: equal ids with other images are another prompt.
    """
    groups: dict[Any, list[int]] = {}
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if completion:
            key = (prompt, images_hashes and images_hashes[index])
            groups.setdefault(key if share else index, []).append(index)
    return [
        Block(
            tuple(members),
            len(prompts[members[0]]) - 1,
            tuple(len(completions[index]) for index in members),
        )
        for members in groups.values()
    ]


def pack(
    blocks: Sequence[Block],
    prompts: Sequence[tuple[int, ...]],
    completions: Sequence[tuple[int, ...]],
    starts: Sequence[int],
) -> tuple[dict[str, Tensor], Tensor]:
    """The row of `blocks`, and where each of its labels belongs.

    Args:
        starts: the index at which each completion's outputs begin.

    Returns:
        `input_ids`, `position_ids` and `shift_labels`, each (1, L), with labels of `IGNORE` where no token is wanted;
        and the (1, L) indices of the labels. L is 1 where there is nothing to score.
    """
    ids: list[int] = []
    positions: list[int] = []
    labels: list[int] = []
    places: list[int] = []
    for block in blocks:
        prompt = prompts[block.members[0]]
        ids += prompt[:-1]
        positions += range(block.shared)
        labels += [IGNORE] * block.shared
        places += [0] * block.shared
        for index, length in zip(block.members, block.lengths, strict=True):
            ids += (prompt[-1], *completions[index][:-1])
            positions += range(block.shared, block.shared + length)
            labels += completions[index]
            places += range(starts[index], starts[index] + length)
    if not ids:
        ids = [0]
        positions = [0]
        labels = [IGNORE]
        places = [0]
    rows = {"input_ids": ids, "position_ids": positions, "shift_labels": labels}
    return {name: torch.tensor([row]) for name, row in rows.items()}, torch.tensor([places])


def attention_inputs(
    path: str, blocks: Sequence[Block], device: torch.device
) -> dict[str, Any]:
    """The model's inputs beside the row that keep its sequences apart."""
    if path == "segments":
        # transformers makes no mask of its own where it is given one of four dimensions; nobody reads this one.
        mask = torch.ones(1, 1, 1, 1, device=device)
        return {"attention_mask": mask, "segments": Segments(list(blocks))}
    lengths = [block.shared + length for block in blocks for length in block.lengths] or [1]
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    return {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def block_mask(block: Block) -> Tensor:
    """(1, 1, L, L), True where a token of the block may see another: its own sequence and the prompt before it."""
    lengths = torch.tensor([block.shared, *block.lengths])
    members = torch.arange(len(lengths)).repeat_interleave(lengths)
    may_see = (members.unsqueeze(1) == members) | (members == 0)
    return may_see.tril()[None, None]


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one packed row: `query` (1, H, L, D), `key` and `value` (1, H_kv, L, D) to (1, L, H, D).

    A short block is one call with a mask. In others, the prompt and the first completion are one causal sequence.
    Every other completion attends to the prompt's keys and its own, aligned at the last token.
    """
    attend: Callable[..., tuple[Tensor, None]] = functools.partial(_attend, module, **kwargs)
    if segments is None:
        return attend(query, key, value, attention_mask)
    segments.num_served += 1
    # As autocast would cast, which does not see the bias's call.
    query = query.to(value.dtype)
    key = key.to(value.dtype)
    outputs: list[Tensor] = []
    start = 0
    for block in segments.blocks:
        rows = slice(start, start + block.size)
        parts = (query[:, :, rows], key[:, :, rows], value[:, :, rows])
        if len(block.lengths) > 1 and block.size <= WHOLE:
            if start not in segments.masks:
                segments.masks[start] = block_mask(block).to(query.device)
            outputs.append(attend(*parts, segments.masks[start])[0])
        else:
            outputs += _attend_by_member(attend, block, *parts)
        start += block.size
    if not outputs:  # nothing to score
        return attend(query, key, value, None)
    return torch.cat(outputs, dim=1), None


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention with PyTorch's function, in float32 where that is the faster."""
    stock: Callable[..., tuple[Tensor, None]] = functools.partial(
        sdpa_attention_forward, module, attention_mask=attention_mask, **kwargs
    )
    if query.device.type != "cpu" or query.size(2) > WIDENED:
        return stock(query, key, value)
    with torch.autocast("cpu", enabled=False):
        output, weights = stock(query.float(), key.float(), value.float())
    return output.to(value.dtype), weights


def _attend_by_member(
    attend: Callable[..., tuple[Tensor, None]],
    block: Block,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> list[Tensor]:
    """The outputs of a block's rows: its prompt with the first completion, then each other completion."""
    shared = block.shared
    end = block.shared + block.lengths[0]
    first = attend(query[:, :, :end], key[:, :, :end], value[:, :, :end], None)[0]
    outputs = [first]
    for length in block.lengths[1:]:
        rows = slice(end, end + length)
        keys = torch.cat([key[:, :, :shared], key[:, :, rows]], dim=2)
        values = torch.cat([value[:, :, :shared], value[:, :, rows]], dim=2)
        # One query sees every key, and needs no bias.
        bias = causal_lower_right(length, shared + length) if length > 1 else None
        outputs.append(attend(query[:, :, rows], keys, values, bias)[0])
        end += length
    return outputs
