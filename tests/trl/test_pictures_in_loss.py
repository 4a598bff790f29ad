"""A policy that sees, held to TRL's GRPOTrainer on the same pictures and completions; and to its own pictures."""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from PIL import Image as Pillow
from transformers import AutoModelForImageTextToText

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from trl import GRPOConfig, GRPOTrainer

from tests.tiny_vision import write_tiny_vision_model
from ycore.engine.sight import Sight, image_token_ids, load_sight
from ycore.round.assemble import load_tokenizer
from ycore.run.files import ImageStore, png_of
from ycore.trl.build import placeholder_rewards, vision_modules
from ycore.trl.forward import NEVER, never_write
from ycore.trl.grpo import ReinforceTrainer
from ycore.trl.seam import SeamGRPOTrainer
from ycore.types import IMAGE_MARK, Completion, Draw, Group, Prompt, Score, in_blocks

GROUP_SIZE, MAX_TOKENS, TOLERANCE = 4, 7, 1e-6
COLOURS = ("red", "lime", "blue", "white", "black", "orange")
QUESTIONS = [
    f"{IMAGE_MARK}?",
    f"{IMAGE_MARK} + {IMAGE_MARK}",
    f"{IMAGE_MARK} + {IMAGE_MARK}",
    "none",
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the tiny model that sees, with larger weights, so that pictures matter."""
    folder = write_tiny_vision_model(tmp_path_factory.mktemp("model"))
    loaded = AutoModelForImageTextToText.from_pretrained(folder)
    with torch.no_grad():
        for parameter in loaded.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    loaded.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sight(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Sight:
    store = ImageStore(tmp_path_factory.mktemp("run") / "images")
    return sight_of(model, store)


def sight_of(model: Path, store: ImageStore) -> Sight:
    return load_sight(model, store, load_tokenizer(model, trust_remote_code=False))


def prompts_of(sight: Sight) -> list[Prompt]:
    """Return prompts of one picture, of two, of two others under the very same words, and of none."""
    colours = iter(COLOURS)
    made = []
    for row, question in enumerate(QUESTIONS):
        files = [
            png_of(Pillow.new("RGB", (8, 8), next(colours)))
            for _ in range(question.count(IMAGE_MARK))
        ]
        images = tuple(sight.store.put(file, f"row {row}") for file in files)
        made.append(Prompt(row, [{"role": "user", "content": question}], {}, images))
    return made


def groups_of(sight: Sight, prompts: list[Prompt]) -> list[Group]:
    draw = torch.Generator().manual_seed(3)
    made = []
    for prompt in prompts:
        completions, scores = [], []
        for _ in range(GROUP_SIZE):
            length = int(torch.randint(1, MAX_TOKENS + 1, (1,), generator=draw))
            ids = torch.randint(6, 90, (length,), generator=draw).tolist()
            completions.append(Completion(tuple(ids), None, "", "length", 0))
            scores.append((Score(float(torch.rand(1, generator=draw))),))
        made.append(
            Group(
                Draw(prompt.row, prompt, sight.prompt_ids(prompt)),
                tuple(completions),
                tuple(scores),
            )
        )
    return made


class Recorded:
    constraint_weights = None

    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups

    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        return self.groups


def build(
    model: Path, sight: Sight, groups: list[Group], output: Path, *, lora: bool, **settings: Any
) -> Any:
    """Build TRL's own trainer, whose model never writes a picture's token either, and ours."""
    arguments = {
        "output_dir": str(output),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "seed": 7,
        "num_generations": GROUP_SIZE,
        "max_completion_length": MAX_TOKENS,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        **settings,
    }

    def common() -> dict[str, Any]:
        peft = (
            LoraConfig(r=4, target_modules="all-linear", exclude_modules=vision_modules(model))
            if lora
            else None
        )
        return {
            "model": str(model),
            "args": GRPOConfig(**arguments),
            "train_dataset": Dataset.from_dict(
                {"prompt": ["tick"] * (len(groups) * GROUP_SIZE)}
            ),
            "processing_class": load_sight(
                model, sight.store, load_tokenizer(model, trust_remote_code=False)
            ).processor,
            "peft_config": peft,
        }

    def play_back(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        written = [
            list(completion.token_ids) for group in groups for completion in group.completions
        ]
        prompt_ids = [list(group.draw.token_ids) for group in groups for _ in range(GROUP_SIZE)]
        return {"prompt_ids": prompt_ids, "completion_ids": written, "logprobs": None}

    plain = GRPOTrainer(reward_funcs=[told], rollout_func=play_back, **common())
    bare = [
        network
        for network in (plain.accelerator.unwrap_model(plain.model), plain.ref_model)
        if network is not None
    ]
    for network in bare:
        never_write(
            network.get_base_model() if lora else network,
            image_token_ids(network.config.to_dict()),
        )
    ours = SeamGRPOTrainer(reward_funcs=placeholder_rewards(["told"]), **common())
    ours.rounds, ours.open_image = Recorded(groups), sight.store.open
    for trainer in (plain, ours):
        trainer.current_gradient_accumulation_steps = 2
        disturb(trainer, only="lora_B" if lora else "nothing")
    ours._seed_generators = lambda use: None
    return plain, ours


def told(completions: list[Any], reward: list[float], **_: Any) -> list[float]:
    return reward


def disturb(trainer: GRPOTrainer, *, only: str) -> None:
    draw = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if only in name:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))


def rows_for_trl(sight: Sight, groups: list[Group]) -> list[dict[str, Any]]:
    return [
        {
            "prompt": in_blocks(group.draw.prompt.content),
            "images": [sight.store.open(image.sha256) for image in group.draw.prompt.images],
            "reward": score.value,
        }
        for group in groups
        for (score,) in group.scores_GR
    ]


def train(
    trainer: GRPOTrainer, rows: list[dict[str, Any]]
) -> tuple[float, dict[str, torch.Tensor]]:
    trainer.model.zero_grad()
    torch.manual_seed(5)
    loss = sum(trainer.training_step(trainer.model, rows, None).item() for _ in range(2))
    return loss, {
        name: p.grad.clone()
        for name, p in trainer.model.named_parameters()
        if p.grad is not None
    }


CASES = [
    pytest.param(
        lora,
        packs,
        settings,
        id=f"{'lora' if lora else 'full'}-{'packed' if packs else 'padded'}-{settings}",
    )
    for lora, packs, settings in itertools.product(
        (False, True),
        (True, False),
        ({}, {"beta": 0.05}, {"loss_type": "grpo", "temperature": 0.7}),
    )
]


@pytest.mark.parametrize(("lora", "packs", "settings"), CASES)
def test_loss_and_gradients_equal_trl(
    lora: bool, packs: bool, settings: dict[str, Any], model: Path, sight: Sight, tmp_path: Path
) -> None:
    groups = groups_of(sight, prompts_of(sight))
    plain, ours = build(model, sight, groups, tmp_path, lora=lora, **settings)
    assert ours.packs_pictures
    ours.packs_pictures = packs
    rows = rows_for_trl(sight, groups)
    (expected, slopes), (loss, own_slopes) = train(plain, rows), train(ours, rows)
    assert own_slopes.keys() == slopes.keys()
    norm = torch.stack([slope.norm() for slope in slopes.values()]).norm().item()
    assert norm > 1e-3
    assert abs(loss - expected) <= TOLERANCE * max(1.0, abs(expected))
    assert max(
        (own_slopes[name] - slope).abs().max().item() for name, slope in slopes.items()
    ) <= TOLERANCE * max(1.0, norm)
    seen = [name for name in slopes if "vision_tower" in name or "projector" in name]
    assert bool(seen) != lora, "the eyes are frozen under LoRA, and trained with every weight"


@pytest.mark.parametrize("packs", [True, False], ids=["packed", "padded"])
def test_other_pictures_give_other_log_probabilities(
    packs: bool, model: Path, sight: Sight, tmp_path: Path
) -> None:
    """Words and completions are the same in one micro-batch: only what is seen differs."""
    prompt, other = prompts_of(sight)[1:3]
    assert sight.prompt_ids(prompt) == sight.prompt_ids(other)
    first, _ = groups_of(sight, [prompt, other])
    second = Group(Draw(1, other, first.draw.token_ids), first.completions, first.scores_GR)
    _, ours = build(
        model, sight, [first, second], tmp_path, lora=False, per_device_train_batch_size=4
    )
    ours.packs_pictures = packs
    batch = ours._generate_and_score_completions([{"prompt": "tick"}] * (2 * GROUP_SIZE))
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    seen = {name: batch[name] for name in ("pixel_values", "num_images")}
    with torch.no_grad():
        logps, _, _ = ours._get_per_token_logps_and_entropies(
            ours.model, ids, mask, batch["completion_ids"].size(1), **seen
        )
    gaps = (
        (logps[:GROUP_SIZE] - logps[GROUP_SIZE:]).abs() * batch["completion_mask"][:GROUP_SIZE]
    ).sum(dim=1)
    assert gaps.min() > 0.01
    alone = true_logprobs(model, sight, second)
    for row, expected in zip(logps[GROUP_SIZE:], alone, strict=True):
        torch.testing.assert_close(row[: len(expected)], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("packs", [True, False], ids=["packed", "padded"])
def test_the_kl_in_the_reward_is_that_of_a_policy_that_sees(
    packs: bool, model: Path, sight: Sight, tmp_path: Path
) -> None:
    """Before its first step the policy is the reference, which sees: no token has a KL."""
    groups = groups_of(sight, prompts_of(sight)[1:3])
    args = GRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to="none",
        beta=0.05,
        num_generations=GROUP_SIZE,
        max_completion_length=MAX_TOKENS,
        per_device_train_batch_size=8,
    )
    trainer = ReinforceTrainer(
        model=str(model),
        args=args,
        reward_funcs=placeholder_rewards(["told"]),
        train_dataset=Dataset.from_dict({"prompt": ["tick"] * 8}),
        processing_class=sight.processor,
        peft_config=LoraConfig(
            r=4, target_modules="all-linear", exclude_modules=vision_modules(model)
        ),
        kl_in="reward",
    )
    trainer.rounds, trainer.open_image = Recorded(groups), sight.store.open
    trainer.packs_pictures = packs
    trainer.current_gradient_accumulation_steps = 1
    trainer.training_step(trainer.model, [{"prompt": "tick"}] * 8, None)
    (kl,) = trainer._metrics["train"]["kl"]
    assert kl == pytest.approx(0.0, abs=1e-6)


def true_logprobs(model: Path, sight: Sight, group: Group) -> list[torch.Tensor]:
    """Compute them by transformers' own model, a completion at a time."""
    loaded = AutoModelForImageTextToText.from_pretrained(model)
    never_write(loaded, image_token_ids(loaded.config.to_dict()))
    logprobs = []
    for completion in group.completions:
        inputs, ids = sight.inputs([group.draw.prompt]), torch.tensor([completion.token_ids])
        whole = torch.cat([inputs["input_ids"], ids], dim=1)
        with torch.no_grad():
            logits = loaded(input_ids=whole, pixel_values=inputs["pixel_values"]).logits[
                0, -ids.size(1) - 1 : -1
            ]
        logprobs.append(logits.log_softmax(-1).gather(-1, ids[0][:, None])[:, 0])
    return logprobs


def test_a_picture_is_never_written_and_the_others_share_its_part(model: Path) -> None:
    loaded = AutoModelForImageTextToText.from_pretrained(model)
    (token,) = image_token_ids(loaded.config.to_dict())
    ids = torch.tensor([[5, 20, 21]])
    with torch.no_grad():
        before = loaded(input_ids=ids).logits
        never_write(loaded, [token])
        after = loaded(input_ids=ids).logits
    assert (
        after[..., token].max() < NEVER / 2
        and after.log_softmax(-1).exp()[..., token].max() == 0
    )
    rest = [number for number in range(before.size(-1)) if number != token]
    torch.testing.assert_close(after[..., rest], before[..., rest])
    assert not any("lm_head.bias" in name for name in loaded.state_dict())
