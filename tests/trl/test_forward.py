"""The packed forward: scores and gradients are those of each sequence alone."""

import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from transformers import AutoModelForCausalLM, PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from tests.tiny_model import write_tiny_model
from ycore.errors import RunError
from ycore.trl import forward, packing
from ycore.trl.forward import (
    PaddedRows,
    add_compact_head,
    fuse_adapters,
    packed_scores,
    score_tokens,
)
from ycore.trl.packing import use_segments

TEMPERATURE = 0.8
PAD = 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return _loaded(write_tiny_model(tmp_path_factory.mktemp("model")))


def _loaded(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    add_fused_lm_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    add_compact_head(model, temperature=TEMPERATURE)
    use_segments(model)
    return model


def padded(
    prompts: list[list[int]], completions: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Build a batch as TRL does: prompts padded left, completions padded right."""
    before, after = max(map(len, prompts)), max(1, *map(len, completions))
    ids, mask = [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        left, right = before - len(prompt), after - len(completion)
        ids.append([PAD] * left + prompt + completion + [PAD] * right)
        mask.append([0] * left + [1] * (len(prompt) + len(completion)) + [0] * right)
    return torch.tensor(ids), torch.tensor(mask), after


def one_by_one(
    model: PreTrainedModel, prompts: list[list[int]], completions: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities and entropies by a forward of each sequence alone."""
    width = max(1, *map(len, completions))
    logps, entropies = torch.zeros(len(prompts), width), torch.zeros(len(prompts), width)
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        logits = (
            model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            / TEMPERATURE
        )
        log_p = logits.log_softmax(-1)
        logps[index, : len(completion)] = log_p[range(len(completion)), completion]
        entropies[index, : len(completion)] = -(log_p.exp() * log_p).sum(-1)
    return logps, entropies


def random_batch(seed: int) -> tuple[list[list[int]], list[list[int]]]:
    draw = random.Random(seed)
    prompts: list[list[int]] = []
    for _ in range(draw.randint(1, 4)):
        prompt = [draw.randint(6, 90) for _ in range(draw.choice([1, 2, 7, 20]))]
        prompts += [prompt] * draw.randint(1, 4)
    draw.shuffle(prompts)
    return prompts, [
        [draw.randint(6, 90) for _ in range(draw.choice([1, 2, 5, 13]))] for _ in prompts
    ]


@pytest.mark.parametrize(("path", "whole"), [("segments", 512), ("segments", 0), ("varlen", 0)])
@pytest.mark.parametrize("seed", range(15))
def test_scores_equal_those_of_each_sequence_alone(
    model: PreTrainedModel, seed: int, path: str, whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "WHOLE", whole)
    prompts, completions = random_batch(seed)
    ids, mask, width = padded(prompts, completions)
    with torch.no_grad():
        logps, entropies = packed_scores(model, PaddedRows(ids, mask, width), path=path)
        expected, expected_entropies = one_by_one(model, prompts, completions)
    torch.testing.assert_close(logps, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropies, expected_entropies, rtol=0, atol=1e-5)


@pytest.mark.parametrize("prompt_length", [1, 4])
def test_masked_out_completions_score_zero_beside_others(
    model: PreTrainedModel, prompt_length: int
) -> None:
    """`mask_truncated_completions` takes completions out whole: two of a group, or all of them."""
    prompt = [9, 8, 7, 6][:prompt_length]
    for completions in ([[5, 6, 7], [], [], [8]], [[], [], [], []]):
        ids, mask, width = padded([prompt] * 4, completions)
        logps, _ = packed_scores(model, PaddedRows(ids, mask, width), path="segments")
        with torch.no_grad():
            expected, _ = one_by_one(model, [prompt] * 4, [c or [5] for c in completions])
        for index, completion in enumerate(completions):
            assert torch.equal(
                logps[index, len(completion) :], torch.zeros(width - len(completion))
            )
            torch.testing.assert_close(
                logps[index, : len(completion)],
                expected[index, : len(completion)],
                rtol=0,
                atol=1e-5,
            )
        model.zero_grad()
        logps.sum().backward()  # also where nothing is scored: DDP waits for every rank's backward


def test_a_padding_token_inside_a_prompt_is_a_token(model: PreTrainedModel) -> None:
    prompts, completions = [[PAD, 9, PAD], [7]], [[PAD, 5], [6, 2]]
    ids, mask, width = padded(prompts, completions)
    with torch.no_grad():
        logps, _ = packed_scores(model, PaddedRows(ids, mask, width), path="segments")
        expected, _ = one_by_one(model, prompts, completions)
    torch.testing.assert_close(logps, expected, rtol=0, atol=1e-5)


def test_calls_without_the_fused_head_and_generation_are_as_before(
    model: PreTrainedModel,
) -> None:
    prompts = torch.tensor([[PAD, PAD, 9, 8], [7, 6, 5, 9]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    both = model.generate(prompts, attention_mask=mask, max_new_tokens=6, do_sample=False)
    alone = model.generate(prompts[:1, 2:], max_new_tokens=6, do_sample=False)
    assert both[0, 4:].tolist() == alone[0, 2:].tolist()
    assert (
        model._supports_logits_to_keep()
    )  # read from the signature: else generation projects the whole prompt


@pytest.mark.parametrize(
    "outputs", [("log_probs",), ("log_probs", "entropy")], ids=["reference", "policy"]
)
@pytest.mark.parametrize("as_on_a_device", [False, True])
def test_packed_rows_fit_trls_own_head(
    tmp_path: Path,
    outputs: tuple[str, ...],
    as_on_a_device: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TRL's head scores the labelled positions only where Triton runs, and gives a reference no entropies."""
    if as_on_a_device:
        monkeypatch.setattr("trl.trainer.utils._use_triton", lambda device: True)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path))
    add_fused_lm_head(model, temperature=TEMPERATURE, outputs=outputs)
    use_segments(model)
    prompts, completions = random_batch(0)
    ids, mask, width = padded(prompts, completions)
    logps, entropies = packed_scores(model, PaddedRows(ids, mask, width), path="segments")
    logps.sum().backward()
    with torch.no_grad():
        expected, expected_entropies = one_by_one(model, prompts, completions)
    torch.testing.assert_close(logps.detach(), expected, rtol=0, atol=1e-5)
    wanted = expected_entropies if "entropy" in outputs else torch.zeros_like(expected)
    torch.testing.assert_close(entropies, wanted, rtol=0, atol=1e-5)


def test_a_model_whose_attention_ignores_the_segments_is_refused(tmp_path: Path) -> None:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path))
    add_fused_lm_head(model, temperature=TEMPERATURE)
    ids, mask, width = padded([[5, 6, 7]], [[8, 9]])
    with pytest.raises(RunError, match="ignores packed rows"):
        packed_scores(model, PaddedRows(ids, mask, width), path="segments")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_those_of_each_sequence_alone(
    tmp_path: Path, checkpointing: bool
) -> None:
    model = _loaded(write_tiny_model(tmp_path))
    prompts, completions = random_batch(3)
    ids, mask, width = padded(prompts, completions)
    alone, _ = one_by_one(model, prompts, completions)
    alone.sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    logps, _ = packed_scores(model, PaddedRows(ids, mask, width), path="segments")
    logps.sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-4)


# -- the head ----------------------------------------------------------------------------------------------------------

N, HIDDEN, VOCABULARY = 11, 8, 23


def made(
    bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, HIDDEN, generator=draw)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=draw)
    targets = torch.randint(0, VOCABULARY, (N,), generator=draw)
    upstream = torch.randn(N, generator=draw)
    return (
        hidden,
        weight,
        torch.randn(VOCABULARY, generator=draw) if bias else None,
        targets,
        upstream,
    )


def head_of(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    return SimpleNamespace(weight=weight, bias=bias)


def by_the_book(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.nn.functional.linear(hidden, weight, bias) / temperature
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize(
    ("frozen", "bias", "temperature", "tile"),
    list(itertools.product((True, False), (True, False), (1.0, 0.6), (512, 4))),
)
def test_values_and_gradients_equal_a_plain_softmax_in_float64(
    frozen: bool, bias: bool, temperature: float, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "TILE", tile)
    hidden, weight, offset, targets, upstream = made(bias)
    exact_hidden = hidden.double().requires_grad_()
    exact_weight = weight.double().requires_grad_(not frozen)
    expected, entropy = by_the_book(
        exact_hidden,
        exact_weight,
        None if offset is None else offset.double(),
        targets,
        temperature,
    )
    expected.backward(upstream.double())
    hidden.requires_grad_()
    weight.requires_grad_(not frozen)
    logps, entropies = score_tokens(
        hidden, head_of(weight, offset), targets, temperature=temperature
    )
    logps.backward(upstream)
    assert logps.dtype == entropies.dtype == torch.float32
    near = {"rtol": 1e-6, "atol": 1e-6 * 10}  # float32 holds 7 digits, and logps reach -20
    torch.testing.assert_close(logps, expected.float(), **near)
    torch.testing.assert_close(entropies, entropy.float(), **near)
    assert hidden.grad is not None and exact_hidden.grad is not None
    torch.testing.assert_close(hidden.grad, exact_hidden.grad.float(), **near)
    if not frozen:
        assert weight.grad is not None and exact_weight.grad is not None
        torch.testing.assert_close(weight.grad, exact_weight.grad.float(), **near)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_head_without_a_backward_gives_the_same_values(frozen: bool) -> None:
    hidden, weight, offset, targets, _ = made(True)
    weight.requires_grad_(not frozen)
    with_grad, _ = score_tokens(
        hidden.clone().requires_grad_(), head_of(weight, offset), targets, temperature=0.9
    )
    with torch.no_grad():
        without, _ = score_tokens(hidden, head_of(weight, offset), targets, temperature=0.9)
    torch.testing.assert_close(with_grad.detach(), without)
    assert with_grad.requires_grad and not without.requires_grad


@pytest.mark.parametrize(
    ("device", "zero3", "fsdp", "moe", "needs"),
    [
        ("cpu", False, False, False, True),
        ("cuda", False, False, False, False),
        ("cpu", True, False, False, False),
        ("cpu", False, True, False, False),
        ("cpu", False, False, True, False),
    ],
)
def test_a_cpu_with_a_whole_head_needs_the_compact_one(
    device: str,
    zero3: bool,
    fsdp: bool,
    moe: bool,
    needs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forward, "is_deepspeed_zero3_enabled", lambda: zero3)
    accelerator = SimpleNamespace(device=torch.device(device))
    trainer = SimpleNamespace(
        is_fsdp_enabled=fsdp, aux_loss_enabled=moe, accelerator=accelerator
    )
    assert forward.needs_compact_head(trainer) is needs


@pytest.mark.parametrize(("frozen", "tile"), [(True, 4), (False, 4), (True, 512), (False, 512)])
def test_the_mean_of_the_logits_and_the_likeliest_token(
    frozen: bool, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "TILE", tile)
    hidden, weight, offset, targets, _ = made(True)
    logits = torch.nn.functional.linear(hidden, weight, offset) / 0.9
    targets[::2] = logits.argmax(-1)[::2]
    options: Any = {"temperature": 0.9, "with_logits": True}
    weight.requires_grad_(not frozen)
    _, _, means, are_likeliest = score_tokens(
        hidden.clone().requires_grad_(), head_of(weight, offset), targets, **options
    )
    torch.testing.assert_close(means, logits.mean(-1))
    assert are_likeliest.tolist() == (logits.argmax(-1) == targets).tolist() and any(
        are_likeliest
    )
    assert not means.requires_grad


@pytest.mark.parametrize("frozen", [True, False])
def test_nothing_to_score_still_has_a_backward(frozen: bool) -> None:
    hidden, weight, offset, targets, _ = made(False)
    hidden.requires_grad_()
    logps, entropies = score_tokens(
        hidden[:0],
        head_of(weight.requires_grad_(not frozen), offset),
        targets[:0],
        temperature=1.0,
    )
    logps.sum().backward()
    assert logps.shape == entropies.shape == (0,)
    assert hidden.grad is not None and hidden.grad.abs().max() == 0


def test_entropies_carry_no_gradient() -> None:
    hidden, weight, offset, targets, _ = made(False)
    for frozen in (True, False):
        _, entropies = score_tokens(
            hidden.clone().requires_grad_(),
            head_of(weight.clone().requires_grad_(not frozen), offset),
            targets,
            temperature=1.0,
        )
        assert not entropies.requires_grad


@pytest.mark.parametrize("checkpointing", [False, True])
def test_fused_adapters_give_pefts_values_and_gradients(
    checkpointing: bool, tmp_path: Path
) -> None:
    ids = torch.randint(5, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    weights = torch.linspace(-1, 1, 2 * 9).view(2, 9, 1)
    by_side = {}
    for side in ("peft", "fused"):
        adapted = with_adapters(_loaded(write_tiny_model(tmp_path / side)))
        if side == "fused":
            fuse_adapters(adapted)
        if checkpointing:
            adapted.get_base_model().gradient_checkpointing_enable()
            adapted.train()
        logits = adapted(ids).logits
        (logits * weights).sum().backward()
        gradients = [p.grad for p in adapted.parameters() if p.grad is not None]
        with adapted.disable_adapter():
            bare_logits = adapted(ids).logits
        adapted.merge_adapter()
        by_side[side] = [logits, bare_logits, adapted(ids).logits, *gradients]
    assert len(by_side["peft"]) == len(by_side["fused"]) > 10
    for expected, got in zip(by_side["peft"], by_side["fused"], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(by_side["fused"][0], by_side["fused"][1], atol=1e-3)


@pytest.mark.parametrize("settings", [{"lora_dropout": 0.1}, {"use_dora": True}], ids=str)
def test_adapters_that_do_more_stay_pefts(settings: dict[str, Any], tmp_path: Path) -> None:
    adapted = with_adapters(_loaded(write_tiny_model(tmp_path)), **settings)
    fuse_adapters(adapted)
    layers = [module for module in adapted.modules() if isinstance(module, LoraLinear)]
    assert layers and not any("forward" in vars(layer) for layer in layers)


def with_adapters(model: PreTrainedModel, **settings: Any) -> Any:
    adapted = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", **settings)
    )
    generator = torch.Generator().manual_seed(3)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn(weight.shape, generator=generator) * 0.1
    return adapted
