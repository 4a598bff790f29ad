"""One micro-batch through the policy: every shared prompt once, no padding, logits of completions only.

`packed_scores` takes the padded tensors that TRL builds and returns what TRL's own method returns, up to rounding.
`add_compact_head` is for devices without Triton: there TRL's fused head scores every position, prompts and padding
included, and repeats the projection in its backward. `score_tokens` projects only the wanted positions, in tiles.
"""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from trl.trainer.utils import FusedCausalLMOutput

from ycore.errors import RunError
from ycore.trl.packing import IGNORE, Block, attention_inputs, pack, plan_blocks

TILE = 512
"""Tokens projected at a time: a tile of 512 x 49,152 float32 logits is 100 MB, of bfloat16 ones half of it."""

CACHED = 2**18
"""Logits that are worked on at a time: in float32 they fit in a core's cache, which is five times as fast."""

NEVER = -1e4
"""A logit whose probability is 0 in float32 beside any other; an infinite one would make an entropy NaN."""

Compare = Callable[[Tensor, Tensor], Tensor]
"""Takes the log-probabilities of two models, (N, V), and gives a number for each place, (N,)."""

_LOGIT_TRANSFORMS = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier",
)


class Pictures(NamedTuple):
    """The images of a micro-batch's sequences: pixels, (number of images, C, H, W) each, and a hash."""

    pixels: Sequence[Tensor]
    hashes: list[int]

    def of(self, blocks: Sequence[Block], *, first: int) -> Tensor | None:
        """The pixels of the blocks' prompts, whose members are counted from the sequence `first`; None without any."""
        pixels = [self.pixels[first + block.members[0]] for block in blocks]
        return torch.cat(pixels) if any(len(images) for images in pixels) else None


class PaddedRows(NamedTuple):
    """Whole sequences as TRL pads them, (B, P + T): prompts on the left and completions on the right."""

    input_ids: Tensor
    attention_mask: Tensor
    completion_width: int  # T
    wanted: Tensor | None = None  # (B, T), 0 where no output is needed; None wants all
    later_prompts: Tensor | None = None  # see `batches.later_prompt_lengths`
    pictures: Pictures | None = (
        None  # for a model that `packs_pictures`; a shared prompt's are seen once
    )


def packed_scores(
    model: nn.Module,
    rows: PaddedRows,
    *,
    path: str | None,
    names: Sequence[str] = ("log_probs", "entropy"),
    size: int | None = None,
    **arguments: Any,
) -> list[Tensor]:
    """The outputs of these names at the completions' tokens, each (B, T) and zero at padding and where none is wanted.

    Log-probabilities and entropies are in nats and float32; a head may give no entropies, which are then zero.

    Args:
        model: the policy or its reference, wrapped or not, with a fused head (`add_compact_head` or TRL's); or another
            model of packed rows. `arguments` are passed on to it.
        path: how the model's attention is packed, see `packing.path_of`.
        size: sequences per forward; None takes all at once.
    """
    assert path is not None and (rows.pictures is None or rows.later_prompts is None)
    num_rows = len(rows.input_ids)
    passes = [
        _packed_pass(
            model, rows, slice(first, first + (size or num_rows)), path, names, arguments
        )
        for first in range(0, num_rows, size or num_rows)
    ]
    return [torch.cat(outputs) for outputs in zip(*passes, strict=True)]


def _packed_pass(
    model: nn.Module,
    rows: PaddedRows,
    part: slice,
    path: str,
    names: Sequence[str],
    arguments: dict[str, Any],
) -> list[Tensor]:
    ids = rows.input_ids[part]
    width = rows.completion_width
    pictures = rows.pictures
    later = [[0] * width] * len(ids)
    if rows.later_prompts is not None:
        later = rows.later_prompts[part].tolist()
    prompts, completions, starts = _unpad(ids, rows.attention_mask[part], width, later)
    hashes = None if pictures is None else pictures.hashes[part]
    blocks = plan_blocks(prompts, completions, share=path != "varlen", images_hashes=hashes)
    if pictures is not None:
        arguments = {**arguments, "pixel_values": pictures.of(blocks, first=part.start)}
    row, places = pack(blocks, prompts, completions, starts)
    if rows.wanted is not None:
        is_wanted = rows.wanted[part].cpu().bool().flatten()
        row["shift_labels"].masked_fill_(~is_wanted[places], IGNORE)
    inputs = {name: tensor.to(ids.device) for name, tensor in row.items()}
    layout = attention_inputs(path, blocks, ids.device)
    outputs = model(**inputs, **layout, fused_lm_head=True, use_cache=False, **arguments)
    if path == "segments" and not layout["segments"].num_served:
        raise RunError(
            "the model's attention ignores packed rows; take --set trl.model_init_kwargs.attn_implementation=eager"
        )
    scored = inputs["shift_labels"] != IGNORE
    scored_places = places.to(ids.device)[scored]
    placed = []
    for name in names:
        flat = torch.zeros(len(ids) * width, device=ids.device)
        if (output := outputs.get(name)) is not None:
            flat = flat.to(output.dtype).scatter(0, scored_places, output[scored])
        placed.append(flat.view(len(ids), width))
    return placed


def _unpad(
    input_ids: Tensor,
    attention_mask: Tensor,
    width: int,
    later_prompts: Sequence[Sequence[int]],
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[int]]:
    """Token ids of every sequence's prompt and completion, without padding, and its place among (B, T) outputs."""
    split = input_ids.size(1) - width
    keep = attention_mask.bool().cpu()
    ids = input_ids.cpu()
    prompts = []
    completions = []
    starts = []
    for index, (row, mask, lengths) in enumerate(zip(ids, keep, later_prompts, strict=True)):
        prompt = row[:split][mask[:split]].tolist()
        written = row[split:][mask[split:]].tolist()
        start = 0
        for place, length in enumerate([*lengths, 0]):
            if length or place == width:
                prompts.append(tuple(prompt))
                completions.append(tuple(written[start:place]))
                starts.append(index * width + start)
                start = place + length
                prompt = written[place:start]
    return prompts, completions, starts


def has_plain_logits(model: PreTrainedModel) -> bool:
    """Whether the logits are the output embedding's own, neither capped nor scaled."""
    text = model.config.get_text_config().to_dict()
    return all(text.get(key) is None for key in _LOGIT_TRANSFORMS)


def never_write(model: PreTrainedModel, token_ids: Sequence[int]) -> None:
    """Give these tokens the probability 0 wherever the model's head is used: in generation, in ycore's and in TRL's.

    They stand for pictures, and there is none behind one that is written. It is a bias of the head that is not saved;
    a head with a bias of its own keeps that.
    """
    head = model.get_output_embeddings()
    head = getattr(head, "base_layer", head)
    if not token_ids or head.bias is not None:
        return
    bias = torch.zeros(head.out_features, device=head.weight.device, dtype=head.weight.dtype)
    bias[list(token_ids)] = NEVER
    del head.bias
    head.register_buffer("bias", bias, persistent=False)


def skip_absent_pictures(model: PreTrainedModel, token_ids: Sequence[int]) -> None:
    """Call the model without pixels where no row shows a picture: towers of Qwen and Idefics take no empty batch.

    Args:
        token_ids: The tokens that stand for pictures.
    """

    def without(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("pixel_values") is None or any(
            (kwargs["input_ids"] == token_id).any() for token_id in token_ids
        ):
            return None
        return args, {
            name: value
            for name, value in kwargs.items()
            if not name.startswith(("pixel_", "image_"))
        }

    # peft calls the outer forward past its hooks.
    model.base_model.register_forward_pre_hook(without, with_kwargs=True)


def fuse_adapters(model: nn.Module) -> None:
    """Let plain LoRA layers on cores add to their base layer's output in place; the others stay peft's."""
    for layer in model.modules():
        if type(layer) is LoraLinear and len(layer.lora_A) == 1 and not layer.lora_variant:
            (name,) = layer.lora_A
            if isinstance(layer.lora_dropout[name], nn.Identity):
                layer.forward = types.MethodType(_fused_forward, layer)


def _fused_forward(self: LoraLinear, x: Tensor) -> Any:
    if self.disable_adapters or self.merged:
        return type(self).forward(self, x)
    (name,) = self.lora_A
    a = self.lora_A[name].weight
    b = self.lora_B[name].weight
    return _AddAdapter.apply(self.base_layer(x), x, a, b, self.scaling[name])


class _AddAdapter(torch.autograd.Function):
    """A LoRA layer's output, `base + scaling * B A x`, written over the base layer's.

    peft's own makes four passes more over tensors of the output's size, in forward and backward.
    """

    @staticmethod
    def forward(
        ctx: Any, base: Tensor, x: Tensor, a: Tensor, b: Tensor, scaling: float
    ) -> Tensor:
        a_cast = a.to(base.dtype)
        b_scaled = (b * scaling).to(base.dtype)
        rows = x.reshape(-1, x.size(-1)).to(base.dtype)
        hidden = rows @ a_cast.t()
        base.view(-1, base.size(-1)).addmm_(hidden, b_scaled.t())
        ctx.mark_dirty(base)
        ctx.save_for_backward(rows, hidden, a_cast, b_scaled)
        ctx.scaling = scaling
        ctx.shape = x.shape
        return base

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, hidden, a_cast, b_scaled = ctx.saved_tensors
        (grad,) = grads
        grad_rows = grad.reshape(-1, grad.size(-1))
        grad_hidden = grad_rows @ b_scaled
        grad_x = (grad_hidden @ a_cast).view(ctx.shape)
        grad_a = (grad_hidden.t() @ rows).float()
        grad_b = (grad_rows.t() @ hidden).float() * ctx.scaling
        return grad, grad_x, grad_a, grad_b, None


def needs_compact_head(trainer: Any) -> bool:
    """Whether TRL's own head would score every position of this trainer's batches, and ours can take its place.

    Ours computes in the head's own dtype, and it needs a whole head. Trainers that know no auxiliary loss call no fused
    head. On GPUs TRL's Triton kernel is compact itself.
    """
    is_whole = not is_deepspeed_zero3_enabled() and not trainer.is_fsdp_enabled
    return (
        is_whole
        and not getattr(trainer, "aux_loss_enabled", True)
        and trainer.accelerator.device.type not in ("cuda", "xpu")
    )


def add_compact_head(
    model: PreTrainedModel, *, temperature: float, with_logits: bool = False
) -> None:
    """Let `score_tokens` answer the calls with `fused_lm_head=True`, on the labelled positions only.

    Args:
        model: transformers' own, which DDP, DeepSpeed, FSDP and peft all call in the end. TRL has patched it with its
            fused head, which still serves other calls, and models that scale or cap their logits.
        temperature: the logits are divided by it.
        with_logits: also answer with `mean_logits` and `is_top1`.
    """
    if not has_plain_logits(model):
        return
    trl_forward = model.forward

    @functools.wraps(type(model).forward)  # `generate` looks at the signature
    def forward(
        self: PreTrainedModel,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if not fused_lm_head:
            return trl_forward(*args, labels=labels, shift_labels=shift_labels, **kwargs)
        hidden = self.base_model(*args, **kwargs).last_hidden_state
        if shift_labels is None:
            assert labels is not None
            hidden = hidden[:, :-1]
            shift_labels = labels[:, 1:]
        wanted = shift_labels != IGNORE
        names = ["log_probs", "entropy"]
        if with_logits:
            names += ["mean_logits", "is_top1"]
        head = self.get_output_embeddings()
        outputs = score_places(
            hidden, shift_labels, head, names, temperature=temperature, with_logits=with_logits
        )
        return FusedCausalLMOutput(label_mask=wanted, **outputs)

    model.forward = types.MethodType(forward, model)


def add_outputs(model: Any, more: Callable[..., dict[str, Tensor]]) -> None:
    """Let `more` answer the calls of the model's forward with `with_more=True`, from their other arguments."""
    inner = model.forward

    @functools.wraps(getattr(inner, "__func__", inner))
    def forward(self: Any, *args: Any, with_more: bool = False, **kwargs: Any) -> Any:
        return (more if with_more else inner)(*args, **kwargs)

    model.forward = types.MethodType(forward, model)


def score_places(
    hidden: Tensor, labels: Tensor, head: Any, names: Sequence[str], **options: Any
) -> dict[str, Tensor]:
    """Return `score_tokens` of hidden states (B, L, H) by these names, (B, L) each, 0 where there is no label."""
    wanted = labels != IGNORE
    scores = score_tokens(hidden[wanted], head, labels[wanted], **options)
    return {
        name: score.new_zeros(labels.shape).masked_scatter(wanted, score)
        for name, score in zip(names, scores, strict=True)
    }


def score_tokens(
    hidden: Tensor,
    head: Any,
    targets: Tensor,
    *,
    temperature: float,
    with_logits: bool = False,
    other_heads: Sequence[tuple[Tensor, Any]] = (),
    compare: Compare | None = None,
) -> tuple[Tensor, ...]:
    """Log-probability of each target and entropy of its distribution; and how far that is from other models'.

    Args:
        hidden: (N, H) states, each just before its target.
        head: the output embedding, a linear layer of (V, H).
        targets: (N,) token ids.
        temperature: the logits are divided by it.
        with_logits: also give the mean of the logits, and whether the target is the likeliest token.
        other_heads: of each other model its (N, H') states and its output embedding. Where vocabularies are padded to
            different lengths, the tokens of the shorter one are compared.
        compare: takes the two distributions.

    Returns:
        (N,) float32 log-probabilities, with gradient, and (N,) float32 entropies in nats, without; with `with_logits`
        (N,) float32 means and (N,) bool; then `compare` of each other model, (N,), with gradient. The logits of one
        tile exist at a time.
    """
    if (
        torch.is_grad_enabled()
        and not head.weight.requires_grad
        and hidden.requires_grad
        and not other_heads
    ):
        frozen = (head.weight, head.bias)
        return tuple(_FrozenHead.apply(hidden, *frozen, targets, temperature, with_logits))
    heads = [other for _, other in other_heads]
    split_states = [states.split(TILE) for states, _ in other_heads]
    tiles = []
    for states, ids, *of_others in zip(
        hidden.split(TILE), targets.split(TILE), *split_states, strict=True
    ):
        pairs = list(zip(of_others, heads, strict=True))
        arguments = (states, head, ids, temperature, with_logits, pairs, compare)
        tiles.append(checkpoint(_score_tile, *arguments, use_reentrant=False))
    return tuple(torch.cat(parts) for parts in zip(*tiles, strict=True))


def _logits(hidden: Tensor, head: Any, temperature: float) -> Tensor:
    return nn.functional.linear(hidden, head.weight, head.bias).float() / temperature


def _logit_statistics(logits: Tensor, targets: Tensor) -> list[Tensor]:
    """The mean of the logits, (N, V), detached, and whether the target has the highest."""
    return [logits.mean(-1), logits.argmax(-1) == targets]


def _score_tile(
    hidden: Tensor,
    head: Any,
    targets: Tensor,
    temperature: float,
    with_logits: bool,
    other_heads: Sequence[tuple[Tensor, Any]],
    compare: Compare | None,
) -> list[Tensor]:
    logits = _logits(hidden, head, temperature)
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.detach().exp() * log_p.detach()).sum(-1)
    scores = [log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy]
    if with_logits:
        scores += _logit_statistics(logits.detach(), targets)
    for states, other in other_heads:
        assert compare is not None
        log_q = _logits(states, other, temperature).log_softmax(-1)
        size = min(log_p.size(-1), log_q.size(-1))
        scores.append(compare(_first_tokens(log_p, size), _first_tokens(log_q, size)))
    return scores


def _first_tokens(log_p: Tensor, size: int) -> Tensor:
    return log_p if log_p.size(-1) == size else log_p[..., :size].log_softmax(-1)


class _FrozenHead(torch.autograd.Function):
    """d logp / d hidden = (weight[target] - softmax @ weight) / temperature, known as soon as the softmax is.

    With the gradient computed in the forward, tile by tile, each product with the vocabulary is done once. The softmax
    of a tile is taken a few rows at a time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        with_logits: bool,
    ) -> tuple[Tensor, ...]:
        tiles = []
        slopes = []
        num_rows = max(1, CACHED // len(weight))
        for states, ids in zip(hidden.split(TILE), targets.split(TILE), strict=True):
            projected = nn.functional.linear(states, weight, bias)
            probabilities = torch.empty_like(projected)
            for start in range(0, max(1, len(ids)), num_rows):
                rows = slice(start, start + num_rows)
                logits = projected[rows].float() / temperature
                log_p = logits.log_softmax(-1)
                p = log_p.exp()
                probabilities[rows] = p
                logps = log_p.gather(-1, ids[rows].unsqueeze(-1)).squeeze(-1)
                statistics = _logit_statistics(logits, ids[rows]) if with_logits else []
                tiles.append([logps, -(p * log_p).sum(-1), *statistics])
            slopes.append((weight[ids] - probabilities @ weight) / temperature)
        ctx.save_for_backward(torch.cat(slopes))
        logps, *detached = (torch.cat(parts) for parts in zip(*tiles, strict=True))
        ctx.mark_non_differentiable(*detached)
        return logps, *detached

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return grads[0].unsqueeze(-1).to(slopes.dtype) * slopes, None, None, None, None, None
