"""A real vLLM server with a model that sees, in float32: its log-probabilities are the trainer's, before and after a
sync of weights that changed its eyes too."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as Pillow
from transformers import AutoModelForImageTextToText

from tests.tiny_vision import write_tiny_vision_model
from ycore.engine import NEVER, SamplingParams
from ycore.engine.judge_engine import VllmJudge
from ycore.engine.kinds import is_vllm_installed
from ycore.engine.sight import Sight, image_token_ids, load_sight
from ycore.engine.vllm_engine import VllmEngine
from ycore.engine.weights import write_weights
from ycore.judge.declaration import Judge
from ycore.judge.question import with_pictures
from ycore.judge.verdict import Reply
from ycore.placement.placement import JUDGE
from ycore.round.assemble import load_tokenizer
from ycore.run.images import ImageStore, png_of
from ycore.run.paths import RunFolder
from ycore.trl.forward import never_write
from ycore.types import IMAGE_MARK, Completion, Prompt

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed"),
    pytest.mark.skipif(
        "ycore" not in {one.name for one in entry_points(group="vllm.general_plugins")},
        reason="ycore was installed before it had a plugin for vLLM; install it again",
    ),
]
SAMPLING = SamplingParams(max_tokens=8, stop_token_ids=(2,))


def prompts_of(sight: Sight) -> list[Prompt]:
    """Two pictures under the same words, two side by side, and none."""
    red, blue = (
        sight.store.put(png_of(Pillow.new("RGB", (12, 9), name)), "")
        for name in ("red", "blue")
    )
    one, two = f"Which is {IMAGE_MARK}?", f"{IMAGE_MARK}{IMAGE_MARK} alike?"
    asked = [(one, (red,)), (one, (blue,)), (two, (red, blue)), ("Which?", ())]
    return [
        Prompt(row, [{"role": "user", "content": text}], {}, images)
        for row, (text, images) in enumerate(asked)
    ]


async def written(
    engine: VllmEngine, sight: Sight, prompts: Sequence[Prompt]
) -> list[Completion]:
    def ask(prompt: Prompt, seed: int) -> Any:
        return engine.complete(
            sight.prompt_ids(prompt), seed, **({"prompt": prompt} if prompt.images else {})
        )

    return list(
        await asyncio.gather(*(ask(prompt, seed) for seed, prompt in enumerate(prompts * 4)))
    )


def largest_gap(
    model: Any, sight: Sight, prompts: Sequence[Prompt], completions: Sequence[Completion]
) -> float:
    gaps = []
    for prompt, completion in zip([*prompts] * 4, completions, strict=True):
        inputs = (
            sight.inputs([prompt])
            if prompt.images
            else {"input_ids": torch.tensor([sight.prompt_ids(prompt)])}
        )
        ids = torch.tensor([completion.token_ids])
        whole = torch.cat([inputs["input_ids"], ids], dim=1)
        with torch.no_grad():
            logits = model(input_ids=whole, pixel_values=inputs.get("pixel_values")).logits[
                0, -ids.size(1) - 1 : -1
            ]
        logps = logits.float().log_softmax(-1).gather(-1, ids[0][:, None])[:, 0]
        gaps.append((logps - torch.tensor(completion.logprobs)).abs().max().item())
    return max(gaps)


def test_what_vllm_sees_is_what_the_trainer_sees(
    tmp_path: Path, serve: Any, cpu_engine: Any
) -> None:
    folder, run = write_tiny_vision_model(tmp_path / "model"), RunFolder(tmp_path / "run")
    run.root.mkdir()
    sight = load_sight(
        folder, ImageStore(run.images), load_tokenizer(folder, trust_remote_code=False)
    )
    model = AutoModelForImageTextToText.from_pretrained(folder)
    never = image_token_ids(model.config.to_dict())
    never_write(model, never)
    sampling = replace(SAMPLING, logit_bias=dict.fromkeys(never, NEVER))
    prompts = prompts_of(sight)
    spec = cpu_engine(run, folder, max_model_len=64, sees=True)

    async def work() -> None:
        engine = VllmEngine(
            "rollout-0", spec.socket, sampling, request_timeout_s=60, sight=sight
        )
        for version in (0, 1):
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    weight.mul_(
                        1.5
                        if version and weight.ndim > 1 and "embed_tokens" not in name
                        else 1.0
                    )
            write_weights(model, tmp_path / "sent", dtype=torch.float32, version=version)
            await engine.load_weights(tmp_path / "sent", version)
            completions = await written(engine, sight, prompts)
            assert engine.verified_share == 1.0
            assert largest_gap(model, sight, prompts, completions) < 0.001
            assert not any(set(one.token_ids) & set(never) for one in completions)
        await engine.close()
        of_text = VllmEngine(
            "rollout-0", spec.socket, sampling, request_timeout_s=60
        )  # a run without pictures
        await of_text.load_weights(tmp_path / "sent", 1)
        assert of_text.verified_share == 1.0
        await of_text.close()

    with serve(run, [spec]):
        asyncio.run(asyncio.wait_for(work(), 200))


SIMPLE_CHAT = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"


@pytest.mark.verify
def test_a_judge_that_is_served_sees(tmp_path: Path, serve: Any, cpu_engine: Any) -> None:
    """The same question about two pictures: two distributions, and the same one for the same picture."""
    folder, run = write_tiny_vision_model(tmp_path / "model"), RunFolder(tmp_path / "run")
    (folder / "chat_template.jinja").write_text(SIMPLE_CHAT)
    run.root.mkdir()
    spec = replace(cpu_engine(run, folder, max_model_len=512, sees=True), role=JUDGE)
    labels = {"kind": "labels", "labels": {"yes": 1.0, "no": 0.0}}
    judge = Judge.model_validate(
        {"model": str(folder), "rubric": "Is it red?", "verdict": labels}
    )
    store = ImageStore(run.images)
    urls = [
        store.url(store.put(png_of(Pillow.new("RGB", (12, 9), name)), "").sha256)
        for name in ("red", "blue", "red")
    ]
    asked = [
        with_pictures([{"role": "user", "content": "Is it red?"}], shown)
        for shown in ([], *([url] for url in urls))
    ]

    async def work() -> list[Reply]:
        client = VllmJudge("rollout-0", spec.socket, request_timeout_s=60)
        replies = [await client.ask(judge, question, seed=0) for question in asked]
        await client.close()
        return replies

    with serve(run, [spec]):
        without, red, blue, again = asyncio.run(asyncio.wait_for(work(), 200))
    likely = [
        [token.likeliest for token in reply.tokens or ()]
        for reply in (without, red, blue, again)
    ]
    assert likely[1] == likely[3]
    assert likely[0] != likely[1] != likely[2] != likely[0]
