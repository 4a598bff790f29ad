"""How each family that sees reads prompts with pictures: the trainer's side of what `test_seeing_engine` compares."""

from pathlib import Path

import pytest
import torch
from PIL import Image as Pillow
from transformers import AutoModelForImageTextToText

from tests.tiny_vision import FAMILIES, write_tiny_vision_model
from ycore.engine.sight import image_token_ids, load_sight
from ycore.round.assemble import load_tokenizer
from ycore.run.files import ImageStore, png_of
from ycore.trl.forward import skip_absent_pictures
from ycore.types import IMAGE_MARK, Image, Prompt


def ask(row: int, text: str, *images: Image) -> Prompt:
    return Prompt(row, [{"role": "user", "content": text}], {}, images)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_reads_several_pictures_other_sizes_and_none(
    family: str, tmp_path: Path
) -> None:
    folder = write_tiny_vision_model(tmp_path / "model", family)
    store = ImageStore(tmp_path / "images")
    sight = load_sight(folder, store, load_tokenizer(folder, trust_remote_code=False))
    red, blue, wide = (
        store.put(png_of(Pillow.new("RGB", size, name)), "")
        for name, size in (("red", (40, 40)), ("blue", (40, 40)), ("lime", (90, 50)))
    )
    one_picture, two_pictures = f"{IMAGE_MARK}?", f"{IMAGE_MARK}{IMAGE_MARK} alike?"
    prompts = [
        ask(0, one_picture, red),
        ask(1, "No picture?"),
        ask(2, two_pictures, blue, wide),
    ]
    batch = sight.inputs(prompts)
    for prompt, ids, mask in zip(
        prompts, batch["input_ids"], batch["attention_mask"], strict=True
    ):
        assert tuple(ids[mask.bool()].tolist()) == sight.prompt_ids(prompt)
        short = sight.short_ids(prompt)
        assert (short == sight.prompt_ids(prompt)) == (not prompt.images)
    assert "pixel_values" not in sight.inputs(prompts[1:2])
    other = sight.inputs([ask(0, one_picture, blue)])
    seen = sight.inputs(prompts[:1])
    assert torch.equal(seen["input_ids"], other["input_ids"])
    assert not torch.equal(seen["pixel_values"], other["pixel_values"])


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_without_a_picture_are_scored_beside_rows_with_some(
    family: str, tmp_path: Path
) -> None:
    """A micro-batch may have no picture of a round that has some: TRL then passes empty pixels."""
    model = AutoModelForImageTextToText.from_pretrained(
        write_tiny_vision_model(tmp_path, family)
    )
    ids = torch.tensor([[7, 8, 9, 10]])
    pixels = {"pixel_values": torch.zeros(0, 3, 32, 32)}
    if family.startswith("qwen"):
        pixels = {
            "pixel_values": torch.zeros(0, 3 * 2 * model.config.vision_config.patch_size**2),
            "image_grid_thw": torch.zeros(0, 3, dtype=torch.long),
        }
    if family in ("idefics3", "smolvlm"):
        pixels = {
            "pixel_values": torch.zeros(1, 1, 3, 32, 32),
            "pixel_attention_mask": torch.zeros(1, 1, 32, 32, dtype=torch.long),
        }
    skip_absent_pictures(model, image_token_ids(model.config.to_dict()))
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids, **pixels).logits, model(input_ids=ids).logits)
