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

from tests.harness import write_rows, ycore
from tests.tiny_vision import write_tiny_vision_model
from ycore.engine import NEVER, SamplingParams
from ycore.engine.judge_engine import VllmJudge
from ycore.engine.kinds import is_vllm_installed
from ycore.engine.sight import Sight, image_token_ids, load_sight
from ycore.engine.vllm_engine import VllmEngine
from ycore.engine.vllm_plugin import SERVED
from ycore.engine.weights import write_weights
from ycore.judge.declaration import Judge
from ycore.judge.question import with_pictures
from ycore.judge.verdict import Reply
from ycore.placement.placement import JUDGE
from ycore.round.assemble import load_tokenizer
from ycore.run.files import ImageStore, RunFolder, png_of
from ycore.run.metrics import read_metrics
from ycore.trl.forward import never_write
from ycore.types import IMAGE_MARK, Completion, Prompt

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed"),
    pytest.mark.skipif(
        "ycore" not in {plugin.name for plugin in entry_points(group="vllm.general_plugins")},
        reason="ycore was installed before it had a plugin for vLLM; install it again",
    ),
]
SAMPLING = SamplingParams(max_tokens=8, stop_token_ids=(2,))


def prompts_of(sight: Sight) -> list[Prompt]:
    """Return two prompts of pictures under the same words, two of other sizes side by side, and none."""
    sizes = {"red": (12, 9), "blue": (12, 9), "lime": (90, 50)}
    red, blue, lime = (
        sight.store.put(png_of(Pillow.new("RGB", size, name)), "")
        for name, size in sizes.items()
    )
    one_picture, two_pictures = f"Which is {IMAGE_MARK}?", f"{IMAGE_MARK}{IMAGE_MARK} alike?"
    questions = [
        (one_picture, (red,)),
        (one_picture, (blue,)),
        (two_pictures, (red, lime)),
        ("Which?", ()),
    ]
    return [
        Prompt(row, [{"role": "user", "content": text}], {}, images)
        for row, (text, images) in enumerate(questions)
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


def logprobs(model: Any, sight: Sight, prompt: Prompt, token_ids: Sequence[int]) -> Any:
    """Return the trainer's log-probabilities of a completion."""
    inputs = {"input_ids": torch.tensor([sight.prompt_ids(prompt)])}
    if prompt.images:
        inputs = dict(sight.inputs([prompt]))
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    ids = torch.tensor([token_ids])
    more = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for name in inputs:
        if name in more or name.endswith("token_type_ids"):
            inputs[name] = torch.cat([inputs[name], more.get(name, ids * 0)], dim=1)
    with torch.no_grad():
        logits = model(**inputs).logits[0, -ids.size(1) - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, ids[0][:, None])[:, 0]


@pytest.mark.verify
@pytest.mark.parametrize(
    "family",
    SERVED,
)
def test_what_vllm_sees_is_what_the_trainer_sees(
    family: str, tmp_path: Path, serve: Any, cpu_engine: Any
) -> None:
    folder, run = (
        write_tiny_vision_model(tmp_path / "model", family),
        RunFolder(tmp_path / "run"),
    )
    run.root.mkdir()
    sight = load_sight(
        folder, ImageStore(run.images), load_tokenizer(folder, trust_remote_code=False)
    )
    model = AutoModelForImageTextToText.from_pretrained(folder)
    never = image_token_ids(model.config.to_dict())
    never_write(model, never)
    sampling = replace(SAMPLING, logit_bias=dict.fromkeys(never, NEVER))
    prompts = prompts_of(sight)
    spec = cpu_engine(run, folder, max_model_len=192, sees=True)
    draw = torch.Generator().manual_seed(1)

    async def work() -> None:
        engine = VllmEngine(
            "rollout-0", spec.socket, sampling, request_timeout_s=60, sight=sight
        )
        for version in (0, 1):
            if version:
                with torch.no_grad():
                    for weight in model.parameters():
                        weight.add_(0.05 * torch.randn(weight.shape, generator=draw))
            write_weights(model, tmp_path / "sent", dtype=torch.float32, version=version)
            await engine.load_weights(tmp_path / "sent", version)
            completions = await written(engine, sight, prompts)
            assert engine.verified_share == 1.0
            assert not any(set(completion.token_ids) & set(never) for completion in completions)
            gaps = [
                logprobs(model, sight, prompt, completion.token_ids)
                - torch.tensor(completion.logprobs)
                for prompt, completion in zip(prompts * 4, completions, strict=True)
            ]
            gap = max(gap.abs().max() for gap in gaps)
            assert gap < 0.001, gap
            ids = completions[0].token_ids
            red, blue = (logprobs(model, sight, prompt, ids) for prompt in prompts[:2])
            assert (red - blue).abs().max() > 0.01
        await engine.close()
        of_text = VllmEngine(
            "rollout-0", spec.socket, sampling, request_timeout_s=60
        )  # a run without pictures
        await of_text.load_weights(tmp_path / "sent", 1)
        assert of_text.verified_share == 1.0
        await of_text.close()

    with serve(run, [spec]):
        asyncio.run(asyncio.wait_for(work(), 200))


@pytest.mark.slow
@pytest.mark.verify
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("family", SERVED)
def test_a_family_learns_by_its_engine(family: str, full: bool, tmp_path: Path) -> None:
    """It takes two steps on prompts of several pictures, beside one without, whose engine reads what is trained."""
    folder = write_tiny_vision_model(tmp_path / "model", family)
    for number in range(4):
        picture = Pillow.new("RGB", (20 + 30 * number, 40), (80 * number, 200, 90))
        picture.save(tmp_path / f"{number}.png")
    rows = [
        {"prompt": "Is <image> as <image>?", "images": [f"{number}.png", f"{number - 1}.png"]}
        for number in range(1, 4)
    ]
    write_rows(tmp_path / "rows.jsonl", [*rows, {"prompt": "Why?", "images": []}])
    (tmp_path / "rewards.py").write_text(VARIETY)
    ycore(
        f"grpo --model {folder} --dataset rows.jsonl --reward rewards.py:variety --output out --engine vllm --steps 2 "
        "--prompts-per-step 4 --group-size 4 --max-tokens 8 --learning-rate 1e-2 --per-device-train-batch-size 4 "
        "--set dtype=float32 --set sampling.dynamic=false --set engine.count=1"
        + (" --full" if full else ""),
        cwd=tmp_path,
    )
    steps = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert len(steps) == 2 and all(step["grad_norm"] > 0 for step in steps)
    assert max(step["ycore/logprob_gap"] for step in steps) < 0.001


VARIETY = """
def variety(completions, **columns):
    return [len(set(completion[0]["content"])) / 8 for completion in completions]
"""
SIMPLE_CHAT = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"


@pytest.mark.verify
@pytest.mark.parametrize("family", SERVED)
def test_a_judge_that_is_served_sees(
    family: str, tmp_path: Path, serve: Any, cpu_engine: Any
) -> None:
    """One question about two pictures gets two distributions, and the same one for the same picture."""
    folder, run = (
        write_tiny_vision_model(tmp_path / "model", family),
        RunFolder(tmp_path / "run"),
    )
    if family == "llava":
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
    questions = [
        with_pictures([{"role": "user", "content": "Is it red?"}], pictures)
        for pictures in ([], *([url] for url in urls))
    ]

    async def work() -> list[Reply]:
        client = VllmJudge("rollout-0", spec.socket, request_timeout_s=60)
        replies = [await client.ask(judge, question, seed=0) for question in questions]
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
