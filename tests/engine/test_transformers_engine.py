import asyncio
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image as Pillow
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from trl.trainer.utils import add_fused_lm_head

from tests.tiny_model import write_tiny_model
from tests.tiny_vision import write_tiny_vision_model
from ycore.engine import SamplingParams, transformers_engine
from ycore.engine.sight import image_token_ids, load_sight
from ycore.engine.transformers_engine import TransformersEngine
from ycore.run.files import ImageStore, png_of
from ycore.trl.forward import add_compact_head, never_write
from ycore.types import IMAGE_MARK, Completion, Prompt

PROMPTS = [[9, 8, 7], [30, 31, 32, 33, 34, 35, 36], [50], [60, 61]]
ENDS = (2, *range(6, 26))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Return model and tokenizer as the trainer has them: with its heads, in training."""
    folder: Path = write_tiny_model(tmp_path_factory.mktemp("model"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    add_compact_head(model, temperature=1.0)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return model.train(), tokenizer


def complete(
    parts: tuple[Any, Any],
    sampling: SamplingParams,
    requests: Sequence[tuple[list[int], int]],
    *,
    version: int = 0,
) -> list[Completion]:
    async def work() -> list[Completion]:
        engine = TransformersEngine(*parts, sampling)
        await engine.wait_ready(timeout_s=1)
        await engine.load_weights(Path("/nowhere"), version)
        answers = await asyncio.gather(
            *(engine.complete(prompt, seed) for prompt, seed in requests)
        )
        await engine.close()
        return list(answers)

    return asyncio.run(asyncio.wait_for(work(), 60))


def test_the_generators_of_other_devices_are_left_alone(
    parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To save the state of a device's generator makes a context on it, and every rank would on all."""
    saved: list[object] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(
        torch.cuda, "get_rng_state", lambda device: saved.append(device) or torch.zeros(1)
    )
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: None)
    complete(parts, SamplingParams(max_tokens=2), [(PROMPTS[0], 1)])
    assert saved == []


def test_completions_have_the_shape_of_an_engines(parts: tuple[Any, Any]) -> None:
    requests = [(prompt, seed) for prompt in PROMPTS for seed in range(8)]
    completions = complete(
        parts, SamplingParams(max_tokens=12, stop_token_ids=ENDS), requests, version=3
    )
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    for completion in completions:
        assert completion.logprobs is None and completion.policy_version == 3
        assert not set(completion.token_ids[:-1]) & set(ENDS)
        assert (completion.token_ids[-1] in ENDS) == (completion.finish_reason == "stop")
        assert 1 <= len(completion.token_ids) <= 12
        assert completion.text == parts[1].decode(
            completion.token_ids, skip_special_tokens=True
        )
    assert len({completion.token_ids for completion in completions}) > 20


def test_the_same_request_gives_the_same_completions_and_another_seed_does_not(
    parts: tuple[Any, Any],
) -> None:
    sampling = SamplingParams(max_tokens=12)
    first = complete(parts, sampling, [(prompt, 5) for prompt in PROMPTS])
    assert complete(parts, sampling, [(prompt, 5) for prompt in PROMPTS]) == first
    assert complete(parts, sampling, [(prompt, 6) for prompt in PROMPTS]) != first


@pytest.mark.parametrize("most", [1, 3, 64])
def test_prompts_of_unequal_lengths_do_not_touch_each_other(
    parts: tuple[Any, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_engine, "MAX_BATCH", most)
    greedy = SamplingParams(max_tokens=10, temperature=0)
    together = complete(parts, greedy, [(prompt, 0) for prompt in PROMPTS])
    alone = [complete(parts, greedy, [(prompt, 0)])[0] for prompt in PROMPTS]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    for prompt, completion in zip(PROMPTS, together, strict=True):
        assert completion.token_ids == by_hand(parts[0], prompt, 10)


@pytest.mark.parametrize("has_adapters", [False, True])
def test_the_folders_sampling_defaults_do_not_apply(
    has_adapters: bool, parts: tuple[Any, Any]
) -> None:
    model, tokenizer = copy.deepcopy(parts[0]), parts[1]
    folder = model.generation_config
    folder.repetition_penalty, folder.no_repeat_ngram_size, folder.min_new_tokens = 5.0, 1, 10
    if has_adapters:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    greedy = SamplingParams(max_tokens=10, temperature=0.0)
    for prompt in PROMPTS:
        (completion,) = complete((model, tokenizer), greedy, [(prompt, 0)])
        assert completion.token_ids == by_hand(model, prompt, 10)
    base = model.get_base_model() if has_adapters else model
    assert base.generation_config is folder and folder.repetition_penalty == 5.0


def by_hand(model: Any, prompt: list[int], num_tokens: int) -> tuple[int, ...]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


def test_the_trainers_model_and_random_numbers_are_left_as_they_were(
    parts: tuple[Any, Any],
) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    complete(parts, SamplingParams(max_tokens=4), [([9], 1)])
    assert torch.equal(torch.rand(3), expected)
    assert parts[0].training


def test_a_failed_batch_fails_everyone_in_it_and_no_other(
    parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_engine, "MAX_BATCH", 2)

    async def work() -> list[Any]:
        engine = TransformersEngine(*parts, SamplingParams(max_tokens=4))
        requests = [engine.complete(prompt, 0) for prompt in ([9], [10_000], [8], [7])]
        return await asyncio.gather(*requests, return_exceptions=True)

    answers = asyncio.run(asyncio.wait_for(work(), 60))
    assert [isinstance(answer, IndexError) for answer in answers] == [True, True, False, False]
    assert all(isinstance(answer, Completion) for answer in answers[2:])


def test_pictures_are_seen_and_never_written(tmp_path: Path) -> None:
    """Equal words under two pictures and a text run at once: each is what it is alone, and the pictures matter."""
    model_folder = write_tiny_vision_model(tmp_path / "model")
    model = AutoModelForImageTextToText.from_pretrained(model_folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(6.0 if parameter.ndim > 1 and "embed_tokens" not in name else 1.0)
    never_write(model, image_token_ids(model.config.to_dict()))
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    sight = load_sight(model_folder, ImageStore(tmp_path / "images"), tokenizer)
    pictures = [
        sight.store.put(png_of(Pillow.new("RGB", (8, 8), name)), "") for name in ("red", "blue")
    ]
    chat = [{"role": "user", "content": f"{IMAGE_MARK}What?"}]
    prompts = [Prompt(0, chat, {}, (picture,)) for picture in pictures]

    async def work() -> list[Completion]:
        engine = TransformersEngine(model, tokenizer, SamplingParams(max_tokens=6), sight)
        seen = [
            engine.complete(sight.prompt_ids(prompt), 0, greedy=True, prompt=prompt)
            for prompt in prompts
        ]
        return list(await asyncio.gather(*seen, engine.complete(PROMPTS[0], 0, greedy=True)))

    red, blue, text = asyncio.run(asyncio.wait_for(work(), 60))
    assert red.token_ids != blue.token_ids
    assert sight.short_ids(prompts[0]).count(sight.processor.image_token_id) == 1
    for prompt, completion in zip(prompts, (red, blue), strict=True):
        assert sight.prompt_ids(prompt).count(sight.processor.image_token_id) == 4
        inputs = sight.inputs([prompt])
        for token in completion.token_ids:
            with torch.no_grad():
                likeliest = model(**inputs).logits[0, -1].argmax()
            assert int(likeliest) == token
            inputs["input_ids"] = torch.cat([inputs["input_ids"], likeliest.view(1, 1)], dim=1)
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    assert len(text.token_ids) == 6


@pytest.mark.parametrize("is_half", [True, False])
def test_it_computes_in_the_trainers_dtype_whatever_the_weights_are_kept_in(
    parts: tuple[Any, Any], is_half: bool
) -> None:
    model, tokenizer = parts
    assert model.dtype == torch.float32
    dtypes: list[torch.dtype] = []
    layer = model.model.layers[0].self_attn.q_proj
    handle = layer.register_forward_hook(lambda _, __, output: dtypes.append(output.dtype))

    async def work() -> None:
        engine = TransformersEngine(
            model, tokenizer, SamplingParams(max_tokens=2), is_half=is_half
        )
        await engine.complete([9, 8], 0)
        await engine.logprobs_of([9], [8])

    asyncio.run(asyncio.wait_for(work(), 60))
    handle.remove()
    assert set(dtypes) == {torch.bfloat16 if is_half else torch.float32}
