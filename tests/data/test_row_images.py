import base64
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from ycore.config.schema import RunConfig
from ycore.data.cells import Table
from ycore.data.prompts import PromptSet, to_prompts
from ycore.data.source import read_table
from ycore.errors import DataError
from ycore.run.files import NO_IMAGES, ImageStore, png_of
from ycore.types import IMAGE_MARK, in_blocks

RED, BLUE = (png_of(Pillow.new("RGB", (2, 2), colour)) for colour in ("red", "blue"))
CONFIG = RunConfig(model="m", dataset="d", rewards=[{"reward": "r"}], output="o")


def prompts(
    *rows: dict[str, Any], folder: Path | None = None, store: ImageStore = NO_IMAGES
) -> PromptSet:
    columns = tuple(dict.fromkeys(name for row in rows for name in row))
    return to_prompts(
        Table("data", rows, columns, folder=folder), CONFIG, as_chat=True, store=store
    )


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def refused(**row: Any) -> str:
    with pytest.raises(DataError) as caught:
        prompts(row)
    assert "row 0 of data" in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


def test_a_picture_is_kept_and_the_prompt_has_its_hash(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images")
    prompt_set = prompts(
        {"prompt": "Which colour?", "image": RED},
        {"prompt": "And now?", "image": None},
        store=store,
    )
    first, second = prompt_set.prompts
    assert first.content == user(f"{IMAGE_MARK}Which colour?") and second.content == user(
        "And now?"
    )
    assert store.open(first.images[0].sha256).getpixel((0, 0)) == (255, 0, 0)
    assert (prompt_set.shows, second.images) == (0, ())
    assert prompt_set.columns == ("images",) and first.columns == {}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def blocks(*pictures: dict[str, Any]) -> list[dict[str, Any]]:
    first, second = pictures
    return [
        text("Is "),
        {"type": "image", **first},
        text(" as "),
        {"type": "image", **second},
        text("?"),
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": user("Is <image> as <image>?"), "images": [RED, BLUE]},
        {"prompt": user(blocks({}, {})), "images": [RED, BLUE]},
        {"messages": user(blocks({"image": RED}, {"image": BLUE}))},
    ],
    ids=["hub", "trl", "own"],
)
def test_pictures_stand_where_the_turns_have_them(row: dict[str, Any]) -> None:
    (prompt,) = prompts(row).prompts
    assert prompt.content == user(f"Is {IMAGE_MARK} as {IMAGE_MARK}?")
    assert [image.sha256 for image in prompt.images] == [
        image.sha256
        for image in (ImageStore(None).put(RED, ""), ImageStore(None).put(BLUE, ""))
    ]
    kinds = [block["type"] for block in in_blocks(prompt.content)[0]["content"]]
    assert kinds == ["text", "image", "text", "image", "text"]


def test_every_form_of_a_picture_is_the_same_one(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    url = "data:image/png;base64," + base64.b64encode(RED).decode()
    forms: list[Any] = [
        "red.png",
        RED,
        url,
        {"bytes": RED, "path": None},
        {"bytes": None, "path": "red.png"},
    ]
    forms.append(Pillow.new("RGB", (2, 2), "red"))
    made = prompts(*({"prompt": "?", "image": form} for form in forms), folder=tmp_path).prompts
    assert len({prompt.images for prompt in made}) == 1
    block = {"type": "image_url", "image_url": {"url": url}}
    (said,) = prompts({"prompt": user([block, {"type": "text", "text": "?"}])}).prompts
    assert said.images == made[0].images


def test_paths_begin_at_the_dataset(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "?", "image": "red.png"}))
    table = read_table(str(tmp_path / "rows.jsonl"), split="train", seed=0, limit=None)
    assert to_prompts(table, CONFIG, as_chat=True).prompts[0].images


def test_the_fingerprint_has_the_pictures() -> None:
    red, blue, none = (
        prompts({"prompt": "?", "image": image}).identity for image in (RED, BLUE, None)
    )
    assert len({red, blue, none}) == 3


def test_a_hub_dataset_keeps_its_pictures_as_files() -> None:
    from datasets import Dataset, Features, Image, List, Value

    from ycore.data.source import _as_table

    rows = {
        "prompt": ["a"],
        "image": [{"bytes": RED, "path": None}],
        "images": [[{"bytes": BLUE, "path": None}]],
    }
    features = Features({"prompt": Value("string"), "image": Image(), "images": List(Image())})
    kept = _as_table("rows", Dataset.from_dict(rows, features=features)).rows
    assert kept[0]["image"]["bytes"] == RED and kept[0]["images"][0]["bytes"] == BLUE


def test_bad_rows_are_refused_in_one_line() -> None:
    assert "cannot be read" in refused_in_a_folder("nowhere.png")
    assert "URLs are not fetched" in refused(prompt="?", image="https://example.org/cat.png")
    assert "brings its own" in refused(prompt="?", image="cat.png")
    assert "1 images for 2 places" in refused(
        prompt=user([{"type": "image"}, {"type": "image"}]), image=RED
    )
    assert "no image" in refused(
        prompt=user([{"type": "image"}, {"type": "text", "text": "?"}])
    )
    assert "no image" in refused(prompt="What is <image>?", image=None)
    assert "image 1 is null" in refused(prompt="?", images=[RED, None])
    assert "is int" in refused(prompt="?", image=7)
    assert "no base64" in refused(prompt="?", image="data:image/png;base64,#")
    assert "no picture" in refused(prompt="?", image=b"text")
    assert "type 'video'" in refused(prompt=user([{"type": "video"}]))


def refused_in_a_folder(name: str) -> str:
    with pytest.raises(DataError) as caught:
        prompts({"prompt": "?", "image": name}, folder=Path("/nonexistent"))
    return str(caught.value)


def test_text_prompts_and_pictures_do_not_go_together() -> None:
    table = Table("data", [{"prompt": "?", "image": RED}], ("prompt", "image"))
    with pytest.raises(DataError, match="chat template"):
        to_prompts(table, CONFIG, as_chat=False)


def test_worked_examples_come_before_the_picture() -> None:
    shots = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    config = CONFIG.model_validate(
        CONFIG.model_dump() | {"few_shot": shots, "system_prompt": "Be brief."}
    )
    table = Table("data", [{"prompt": "?", "image": RED}], ("prompt", "image"))
    (prompt,) = to_prompts(table, config, as_chat=True).prompts
    assert [turn["content"].count(IMAGE_MARK) for turn in prompt.content] == [0, 0, 0, 1]


@pytest.mark.parametrize("as_text", [True, False])
def test_a_picture_in_turns_that_are_json_or_no_list_is_read(as_text: bool) -> None:
    url = f"data:image/png;base64,{base64.b64encode(RED).decode()}"
    (turn,) = user([{"type": "image", "image": url}, text("Which colour?")])
    (prompt,) = prompts({"prompt": json.dumps([turn]) if as_text else turn}).prompts
    assert prompt.content == user(f"{IMAGE_MARK}Which colour?") and len(prompt.images) == 1
    (turn,) = user([{"type": "image"}, text("Which colour?")])
    assert "no image" in refused(prompt=json.dumps([turn]) if as_text else turn)
