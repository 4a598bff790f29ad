"""`python -m ycore_docs.digit_models see FOLDER` and `... draw FOLDER`: the small models of the recipes with digits.

`see` makes a model that reads pictures of digits from SmolLM2-135M-Instruct, and rows that ask about them: `train.jsonl`
and `test.jsonl`, whose digits no row of the first shows, and `wrong.jsonl`, whose pictures are others than are asked
about. It is a LLaVA (arXiv 2304.08485) of the language model, a SigLIP tower (arXiv 2303.15343) and two linear layers.
Only tower and layers are trained, and without the language model: a picture's first token becomes the embedding of the
digit that it shows, the others that of a space. The frozen model then reads a picture as it reads the digit.

`draw` makes a model that draws digits, with two of five of its labels drawn anew at random, on purpose: so it draws well,
but does not draw what it is asked for, and there is something to learn from a reward.

Each takes a minute or two. Digits: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine
Learning Repository (1998).
"""

import argparse
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ycore.errors import ModelError

IMAGE_TOKEN = "<image>"
STEPS = 1600
BATCH = 64
RATE = 2e-3
_NOISE = 0.1  # of the pixels, which are from -1 to 1
_SHIFT = 1  # pixels by which a picture moves in training
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for block in message['content'] %}{% if block['type'] == 'image' %}"
    + IMAGE_TOKEN
    + "{% else %}{{ block['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


NUM_TEST = 500
"""Digits that no row of the split `train` shows, and that no model of ycore was made with."""


@cache
def read_digits(split: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return the pictures of a split, (N, 8, 8) from 0 to 255 and white on black, and the digit of each, (N,)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ModelError(
            "the digits come with scikit-learn: pip install 'ycore[pictures]'"
        ) from None
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    rows = order[:NUM_TEST] if split == "test" else order[NUM_TEST:]
    pictures = np.round(digits.images[rows] * (255 / 16)).astype(np.uint8)
    return pictures, digits.target[rows].astype(np.int64)


def make_sighted(base: Path, folder: Path) -> None:
    """Write the model of the language model in `base` into `folder`; the same on the same machine at every call."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        LlavaForConditionalGeneration,
        SiglipVisionConfig,
    )

    torch.manual_seed(0)
    torch.set_num_threads(1)  # sums of several threads depend on how many there are
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [IMAGE_TOKEN]}, replace_extra_special_tokens=False
    )
    language: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    token_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    if token_id >= language.config.vocab_size:
        language.resize_token_embeddings(token_id + 1, mean_resizing=False)
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    tower = SiglipVisionConfig(**sizes, image_size=16, patch_size=8, vision_use_head=False)
    config = vision_config(language.config, tower, token_id)
    model: Any = LlavaForConditionalGeneration(config)
    model.model.language_model.load_state_dict(language.model.state_dict())
    model.tie_weights()
    processor = processor_of(tower, tokenizer, _TEMPLATE)
    share = _align(model, processor)
    if share < 0.95:
        raise ModelError(
            f"the eyes of {folder} read {share:.0%} of the digits kept aside; try another language model"
        )
    model.to(torch.bfloat16).save_pretrained(folder)
    processor.save_pretrained(folder)


def vision_config(text: Any, tower: Any, image_token_id: int) -> Any:
    """Return a LLaVA's config: a language model, a SigLIP tower, and two linear layers between them."""
    from transformers import LlavaConfig

    return LlavaConfig(
        vision_config=tower,
        text_config=text,
        image_token_id=image_token_id,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        image_seq_length=(tower.image_size // tower.patch_size) ** 2,
        tie_word_embeddings=True,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
        dtype="float32",
    )


def processor_of(tower: Any, tokenizer: Any, template: str) -> Any:
    """Return a processor that scales pictures to the side of a SigLIP tower and to -1 to 1.

    It uses Pillow, so that it needs no other library. LLaVA's processor wants a `crop_size`.
    """
    from transformers import LlavaProcessor, SiglipImageProcessorPil

    size = {"height": tower.image_size, "width": tower.image_size}
    return LlavaProcessor(
        image_processor=SiglipImageProcessorPil(size=size, crop_size=size),
        tokenizer=tokenizer,
        patch_size=tower.patch_size,
        vision_feature_select_strategy="full",
        image_token=IMAGE_TOKEN,
        chat_template=template,
    )


def _align(model: Any, processor: Any) -> float:
    """Train tower and projector; return the share of test digits whose first token is nearest to the right word."""
    import torch

    words, space = _targets(model, processor.tokenizer)
    scale = words.var()
    pixels, labels = _pictures(processor, "train")
    trained = [model.model.vision_tower, model.model.multi_modal_projector]
    parameters = [weight for module in trained for weight in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    draw = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        chosen = torch.randint(len(labels), (BATCH,), generator=draw)
        moved = _moved(pixels[chosen], draw)
        seen = torch.stack(model.model.get_image_features(moved).pooler_output)
        wanted = torch.cat(
            [words[labels[chosen]].unsqueeze(1), space.expand(BATCH, seen.size(1) - 1, -1)],
            dim=1,
        )
        distances = (seen[:, :1] - words).square().mean(-1) / scale
        loss = (seen - wanted).square().mean() / scale + torch.nn.functional.cross_entropy(
            -distances, labels[chosen]
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    pixels, labels = _pictures(processor, "test")
    with torch.no_grad():
        seen = torch.stack(model.model.get_image_features(pixels).pooler_output)[:, :1]
    nearest = (seen - words).square().mean(-1).argmin(-1)
    return float((nearest == labels).float().mean())


def _targets(model: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Return the embeddings of the ten digits, (10, H), and of a space, (H,)."""
    ids = [
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (*"0123456789", " ")
    ]
    if any(len(tokens) != 1 for tokens in ids):
        raise ModelError(
            "the eyes learn words of one token, and this tokenizer cuts a digit or a space in several"
        )
    rows = model.get_input_embeddings().weight.detach()[[tokens[0] for tokens in ids]]
    return rows[:10], rows[10]


def _pictures(processor: Any, split: str) -> tuple[Any, Any]:
    import torch
    from PIL import Image

    pictures, digits = read_digits(split)
    opened = [Image.fromarray(picture).convert("RGB") for picture in pictures]
    inputs = processor.image_processor(images=opened, return_tensors="pt")
    return inputs["pixel_values"], torch.from_numpy(digits)


def _moved(pixels: Any, draw: Any) -> Any:
    """Move each picture up to `_SHIFT` pixels aside, and add noise."""
    import torch

    shifts = torch.randint(-_SHIFT, _SHIFT + 1, (len(pixels), 2), generator=draw).tolist()
    moved = [
        torch.roll(picture, (down, right), dims=(1, 2))
        for picture, (down, right) in zip(pixels, shifts, strict=True)
    ]
    return torch.stack(moved) + _NOISE * torch.randn(pixels.shape, generator=draw)


# -- rows --------------------------------------------------------------------------------------------------------------

QUESTION = "What is <image> + <image>? Answer with just the number."
_NUM_ROWS = 1000


def write_rows(folder: Path) -> None:
    """Write the rows, and every picture once; the answer is the sum of the digits that are asked about."""
    from PIL import Image

    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for name in ("train", "test", "wrong"):
        split = "train" if name == "train" else "test"
        pictures, digits = read_digits(split)
        for number, picture in enumerate(pictures):
            Image.fromarray(picture).save(folder / "pictures" / f"{split}-{number}.png")
        chance = random.Random(f"see-and-add {split} 0")
        lines = []
        for _ in range(_NUM_ROWS):
            answer = [chance.randrange(len(digits)) for _ in range(2)]
            shown = answer
            if name == "wrong":
                shown = [chance.randrange(len(digits)) for _ in range(2)]
            row = {
                "prompt": QUESTION,
                "images": [f"pictures/{split}-{number}.png" for number in shown],
                "answer": str(sum(int(digits[number]) for number in answer)),
            }
            lines.append(json.dumps(row) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines))


# -- a model that draws ------------------------------------------------------------------------------------------------

NOISY_LABELS = 0.4


def make_drawing(folder: Path, *, steps: int = 800) -> None:
    """Train the model and write its folder, by flow matching: the mean of `(v - (eps - x0))^2` at even times."""
    import diffusers
    import torch
    from sklearn.datasets import load_digits
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    from ycore.flow.flow_math import noised

    torch.manual_seed(0)
    dataset = load_digits()
    pictures = torch.tensor(dataset.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(dataset.target)
    chance = torch.rand(len(labels)) < NOISY_LABELS
    labels = torch.where(chance, torch.randint(10, labels.shape), labels)
    network = diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(24, 48),
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
        norm_num_groups=8, num_class_embeds=10,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=0.1)
    average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    average.update_parameters(network)
    for number in range(steps):
        rows = torch.randint(len(pictures), (128,))
        x0, times = pictures[rows], torch.rand(128)
        noise = torch.randn_like(x0)
        v = network(
            noised(x0, noise, times), times * 1000, class_labels=labels[rows], return_dict=False
        )[0]
        loss = ((v - (noise - x0)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        average.update_parameters(network)
        if number % 100 == 0:
            print(f"step {number} of {steps}: loss {loss.item():.4f}", flush=True)
    average.module.save_pretrained(folder / "unet")
    diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0).save_pretrained(folder / "scheduler")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Make a small model of the recipes with digits."
    )
    parser.add_argument("kind", choices=("see", "draw"))
    parser.add_argument("folder", type=Path)
    return parser


def main() -> None:
    from ycore.models.fetch import fetch_named

    arguments = make_parser().parse_args()
    if arguments.kind == "draw":
        make_drawing(arguments.folder)
        return
    make_sighted(fetch_named("smollm2-135m"), arguments.folder)
    write_rows(arguments.folder)


if __name__ == "__main__":
    main()
