"""One micro-batch through the policy: every shared prompt once, no padding, logits of completions only.

`score_completions` takes the padded tensors that TRL builds and returns what TRL's own method returns, up to rounding.
`add_compact_head` is for devices without Triton: there TRL's fused head scores every position, prompts and padding
included, and repeats the projection in its backward. `score_tokens` projects only the wanted positions, in tiles.
"""

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from trl.trainer.utils import FusedCausalLMOutput

from ycore.errors import RunError
from ycore.trl.packing import IGNORE, Block, attention_inputs, pack, plan_blocks

TILE = 512
"""Tokens projected at a time: a tile of 512 x 49,152 float32 logits is 100 MB."""

NEVER = -1e4
"""A logit whose probability is 0 in float32 beside any other; an infinite one would make an entropy NaN."""

Compare = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From the log-probabilities of two models, (N, V), to a number for each place."""

_LOGIT_TRANSFORMS = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier",
)


class Pictures(NamedTuple):
    """Of each sequence of a micro-batch its pixels, (number of pictures, C, H, W), and a number that tells them from
    others."""

    pixels: Sequence[torch.Tensor]
    shown: list[int]

    def of(self, blocks: Sequence[Block], *, after: int) -> torch.Tensor | None:
        """Those of the blocks' prompts, whose members are counted from the sequence `after`; None without any."""
        found = [self.pixels[after + block.members[0]] for block in blocks]
        return torch.cat(found) if any(len(one) for one in found) else None


def score_completions(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    completion_width: int,
    wanted: torch.Tensor | None = None,
    begins: torch.Tensor | None = None,
    *,
    path: str,
    size: int | None = None,
    pictures: Pictures | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token log-probabilities and entropies, in nats, of the completions; arguments as for `packed_scores`.

    Returns:
        Two (B, T) float32 tensors, zero at padding and where none is wanted. The entropies are zero where the head
        gives none.
    """
    how: Any = {"path": path, "names": ("log_probs", "entropy"), "size": size, "pictures": pictures}
    logps, entropies = packed_scores(
        model, input_ids, attention_mask, completion_width, wanted, begins, **how
    )
    return logps, entropies


def packed_scores(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    completion_width: int,
    wanted: torch.Tensor | None = None,
    begins: torch.Tensor | None = None,
    *,
    path: str | None,
    names: Sequence[str],
    size: int | None = None,
    pictures: Pictures | None = None,
    **asked: Any,
) -> list[torch.Tensor]:
    """The outputs of these names at the completions' tokens, each (B, T) and zero at padding and where none is wanted.

    Args:
        model: the policy or its reference, wrapped or not, with a fused head (`add_compact_head` or TRL's); or another
            model of packed rows. `asked` is passed on to it.
        input_ids, attention_mask: (B, P + T), prompts padded left and completions padded right.
        completion_width: T.
        wanted: (B, T), 0 where no output is needed; None wants all.
        begins: (B, T), n where n tokens of a completion are the prompt of another sequence, see `batches.begins_of`.
        path: how the model's attention is packed, see `packing.path_of`.
        size: sequences per forward; None takes all at once.
        pictures: of each sequence, for a model that `packs_pictures`; a shared prompt's are seen once.
    """
    assert path is not None and (pictures is None or begins is None)
    per_pass = size or len(input_ids)
    wanted = torch.ones(len(input_ids), completion_width) if wanted is None else wanted
    begins = torch.zeros_like(wanted, dtype=torch.long) if begins is None else begins
    found: list[list[torch.Tensor]] = [[] for _ in names]
    passes_of = (one.split(per_pass) for one in (input_ids, attention_mask, wanted, begins))
    for number, (ids, mask, of_pass, begins_of_pass) in enumerate(zip(*passes_of, strict=True)):
        prompts, completions, starts = _unpad(ids, mask, completion_width, begins_of_pass.tolist())
        shown = None if pictures is None else pictures.shown[number * per_pass :]
        blocks = plan_blocks(prompts, completions, share=path != "varlen", shown=shown)
        if pictures is not None:
            asked["pixel_values"] = pictures.of(blocks, after=number * per_pass)
        row, places = pack(blocks, prompts, completions, starts)
        row["shift_labels"].masked_fill_(~of_pass.cpu().bool().flatten()[places], IGNORE)
        inputs = {name: tensor.to(ids.device) for name, tensor in row.items()}
        layout = attention_inputs(path, blocks, ids.device)
        outputs = model(**inputs, **layout, fused_lm_head=True, use_cache=False, **asked)
        if path == "segments" and not layout["segments"].num_served:
            raise RunError(
                "the model's attention ignores packed rows; take --set trl.model_init_kwargs.attn_implementation=eager"
            )
        scored, places = inputs["shift_labels"] != IGNORE, places.to(ids.device)
        for name, passes in zip(names, found, strict=True):
            output = outputs.get(name)
            flat = torch.zeros(len(ids) * completion_width, device=ids.device)
            if output is not None:
                flat = flat.to(output.dtype).scatter(0, places[scored], output[scored])
            passes.append(flat.view(len(ids), completion_width))
    return [torch.cat(passes) for passes in found]


def _unpad(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    completion_width: int,
    begins: Sequence[Sequence[int]],
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[int]]:
    """Token ids of every sequence's prompt and completion, without padding, and its place among (B, T) outputs."""
    split = input_ids.size(1) - completion_width
    keep, ids = attention_mask.bool().cpu(), input_ids.cpu()
    found = []
    for index, (row, mask, of_row) in enumerate(zip(ids, keep, begins, strict=True)):
        prompt, written = (row[:split][mask[:split]].tolist(), row[split:][mask[split:]].tolist())
        start = 0
        for at, length in ((at, length) for at, length in enumerate(of_row) if length):
            found.append(
                (tuple(prompt), tuple(written[start:at]), index * completion_width + start)
            )
            prompt, start = written[at : at + length], at + length
        found.append((tuple(prompt), tuple(written[start:]), index * completion_width + start))
    prompts, completions, starts = zip(*found, strict=True)
    return list(prompts), list(completions), list(starts)


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


def needs_compact_head(trainer: Any) -> bool:
    """Whether TRL's own head would score every position of this trainer's batches, and ours can take its place.

    Ours computes in the head's own dtype, and it needs a whole head. On GPUs TRL's Triton kernel is compact itself.
    """
    is_whole = not is_deepspeed_zero3_enabled() and not trainer.is_fsdp_enabled
    return (
        is_whole
        and not trainer.aux_loss_enabled
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
        self: PreTrainedModel, *args: Any, fused_lm_head: bool = False, **kwargs: Any
    ) -> Any:
        shifted, labels = kwargs.pop("shift_labels", None), kwargs.pop("labels", None)
        if not fused_lm_head or (shifted is None and labels is None):
            given = {"shift_labels": shifted, "labels": labels}
            kwargs |= {name: value for name, value in given.items() if value is not None}
            return trl_forward(*args, fused_lm_head=fused_lm_head, **kwargs)
        hidden = self.base_model(*args, **kwargs).last_hidden_state
        hidden, labels = (hidden[:, :-1], labels[:, 1:]) if shifted is None else (hidden, shifted)
        head, wanted = self.get_output_embeddings(), labels != IGNORE
        scored: Any = {"temperature": temperature, "with_logits": with_logits}
        found = score_tokens(hidden[wanted], head.weight, head.bias, labels[wanted], **scored)
        names = ("log_probs", "entropy", "mean_logits", "is_top1")
        placed = (one.new_zeros(labels.shape).masked_scatter(wanted, one) for one in found)
        return FusedCausalLMOutput(label_mask=wanted, **dict(zip(names, placed, strict=False)))

    model.forward = types.MethodType(forward, model)


def score_tokens(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    temperature: float,
    with_logits: bool = False,
    others: Sequence[tuple[torch.Tensor, Any]] = (),
    compare: Compare | None = None,
) -> tuple[torch.Tensor, ...]:
    """Log-probability of each target and entropy of its distribution; and how far that is from other models'.

    Args:
        hidden: (N, H) states, each just before its target.
        weight: (V, H) output embedding; `bias`: (V,) or None.
        targets: (N,) token ids.
        temperature: the logits are divided by it.
        with_logits: also give the mean of the logits, and whether the target is the likeliest token.
        others: of each other model its (N, H') states and its output embedding, a linear layer. Where vocabularies are
            padded to different lengths, the tokens of the shorter one are compared.
        compare: what becomes of the two distributions.

    Returns:
        (N,) float32 log-probabilities, with gradient, and (N,) float32 entropies in nats, without; with `with_logits`
        (N,) float32 means and (N,) bool; then `compare` of each other model, (N,), with gradient. The logits of one
        tile exist at a time.
    """
    if torch.is_grad_enabled() and not weight.requires_grad and hidden.requires_grad and not others:
        return tuple(_FrozenHead.apply(hidden, weight, bias, targets, temperature, with_logits))
    heads, rest = [head for _, head in others], [states.split(TILE) for states, _ in others]
    tiles = [
        checkpoint(
            _score_tile, states, weight, bias, ids, temperature, with_logits, [*zip(rows, heads, strict=True)], compare,
            use_reentrant=False,
        )
        for states, ids, *rows in zip(hidden.split(TILE), targets.split(TILE), *rest, strict=True)
    ]  # fmt: skip
    return tuple(torch.cat(parts) for parts in zip(*tiles, strict=True))


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float
) -> torch.Tensor:
    return torch.nn.functional.linear(hidden, weight, bias).float() / temperature


def _of_logits(logits: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    """Of the logits (N, V), detached: their mean, and whether the target has the highest."""
    return [logits.mean(-1), logits.argmax(-1) == targets]


def _score_tile(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    with_logits: bool,
    others: Sequence[tuple[torch.Tensor, Any]],
    compare: Compare | None,
) -> list[torch.Tensor]:
    logits = _logits(hidden, weight, bias, temperature)
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.detach().exp() * log_p.detach()).sum(-1)
    found = [log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy]
    found += _of_logits(logits.detach(), targets) if with_logits else []
    for states, head in others:
        assert compare is not None
        log_q = _logits(states, head.weight, head.bias, temperature).log_softmax(-1)
        size = min(log_p.size(-1), log_q.size(-1))
        both = (
            one if one.size(-1) == size else one[..., :size].log_softmax(-1)
            for one in (log_p, log_q)
        )
        found.append(compare(*both))
    return found


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
        with_logits: bool,
    ) -> tuple[torch.Tensor, ...]:
        tiles, slopes = [], []
        for states, ids in zip(hidden.split(TILE), targets.split(TILE), strict=True):
            logits = _logits(states, weight, bias, temperature)
            of_logits = _of_logits(logits, ids) if with_logits else []
            log_p = logits.log_softmax(-1)
            probabilities = log_p.exp()
            logps = log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
            tiles.append([logps, -(probabilities * log_p).sum(-1), *of_logits])
            expected = probabilities.to(weight.dtype) @ weight
            slopes.append((weight[ids] - expected) / temperature)
        ctx.save_for_backward(torch.cat(slopes))
        logps, *others = (torch.cat(parts) for parts in zip(*tiles, strict=True))
        ctx.mark_non_differentiable(*others)
        return logps, *others

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return grads[0].unsqueeze(-1).to(slopes.dtype) * slopes, None, None, None, None, None
