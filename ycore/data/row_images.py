"""Put the pictures of a dataset's row into the run's store, and a mark where each stands in the prompt."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ycore.data.cells import IMAGE_BLOCKS, IMAGE_COLUMNS, TableRow, listed_cell
from ycore.errors import DataError
from ycore.run.files import MAX_PICTURE_BYTES, ImageStore, png_of
from ycore.types import IMAGE_MARK, Content, Image, Message

_HUB_MARK = "<image>"  # in a text, by LLaVA's datasets and others after it
_KEYS = ("image", "path", "url", "image_url", "base64", "bytes")


def images_of(
    row: TableRow,
    content: Content,
    column: str | None,
    store: ImageStore,
) -> tuple[Image, ...]:
    """Put the pictures of a row into the store; DataError with the row where a picture is missing or damaged.

    Args:
        content: What `cells.content_of` reads in `column`.
    """
    values = [value for name in IMAGE_COLUMNS for value in _listed(row.values.get(name), row)]
    turns = listed_cell(row, column) if column else None
    values = values or list(_in_turns(turns))
    if not values and isinstance(content, list):
        places = _count(content, IMAGE_MARK) if _has_blocks(turns) else 0
        places = places or (
            _count(content, _HUB_MARK) if not set(IMAGE_COLUMNS).isdisjoint(row.values) else 0
        )
        if places:
            raise DataError(
                f"{places} places for an image and no image in {row.place}; add it, or remove the row"
            )
    folder = row.table.folder
    return tuple(store.put(_bytes_of(value, folder, row.place), row.place) for value in values)


def with_marks(content: Content, images: Sequence[Image], place: str) -> Content:
    """Mark the place of each picture: where a block or `<image>` has it, else before the first question."""
    if not images:
        return content
    if isinstance(content, str):
        raise DataError(
            f"a picture and a text prompt in {place}; pictures need chat turns and a model with a chat template"
        )
    num_places = _count(content, IMAGE_MARK)
    if not num_places and _count(content, _HUB_MARK) == len(images):
        content = [
            {**turn, "content": (turn["content"] or "").replace(_HUB_MARK, IMAGE_MARK)}
            for turn in content
        ]
        num_places = len(images)
    if not num_places:
        first = next((turn for turn in content if turn["role"] == "user"), None)
        marks = IMAGE_MARK * len(images)
        content = [
            {**turn, "content": marks + turn["content"]} if turn is first else turn
            for turn in content
        ]
        num_places = len(images) if first is not None else 0
    if num_places != len(images):
        raise DataError(
            f"{len(images)} images for {num_places} places in the turns of {place}; make them as many"
        )
    return content


def _count(content: Sequence[Message], mark: str) -> int:
    return sum((turn["content"] or "").count(mark) for turn in content)


def _listed(value: Any, row: TableRow) -> list[Any]:
    """Return a cell as a list of pictures; an empty cell has none."""
    listed = value if isinstance(value, list | tuple) else [value]
    if len(listed) > 1 and any(picture is None for picture in listed):
        raise DataError(
            f"image {listed.index(None)} is null in {row.place}; add it, or remove its place"
        )
    return [picture for picture in listed if picture is not None and picture != ""]


def _in_turns(turns: Any) -> Any:
    """Yield the content of each image block of a conversation."""
    for turn in (
        turns if isinstance(turns, Sequence) and not isinstance(turns, str | bytes) else ()
    ):
        content = turn.get("content") if isinstance(turn, Mapping) else None
        for block in (
            content if isinstance(content, Sequence) and not isinstance(content, str) else ()
        ):
            if isinstance(block, Mapping) and block.get("type") in IMAGE_BLOCKS:
                yield from (block[key] for key in _KEYS if block.get(key) is not None)


def _has_blocks(turns: Any) -> bool:
    """Tell whether marks in a row's turns stand for blocks, and are no letters of its texts."""
    return not isinstance(turns, str) and any(
        not isinstance(turn.get("content", ""), str) for turn in turns or ()
    )


def _bytes_of(value: Any, folder: Path | None, place: str) -> bytes:
    """Read a picture: bytes, a path beside the dataset, a `data:` URL, datasets' `{bytes, path}`, or an image of PIL."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path") or value.get("url")
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return _read(value, folder, place)
    if hasattr(value, "save") and hasattr(value, "mode"):
        return png_of(value)
    raise DataError(
        f"the image of {place} is {type(value).__name__}; give a path, bytes or an image of datasets"
    )


def _read(name: str, folder: Path | None, place: str) -> bytes:
    if name.startswith("data:"):
        try:
            return base64.b64decode(name.partition(",")[2], validate=True)
        except binascii.Error as problem:
            raise DataError(
                f"the image of {place} is no base64 ({problem}); write it again"
            ) from None
    if "://" in name:
        raise DataError(
            f"the image of {place} is at {name:.80}, and URLs are not fetched; give a file"
        )
    if folder is None:
        raise DataError(
            f"the image of {place} is the file {name:.80}; a dataset of the hub brings its own as bytes"
        )
    path = folder / Path(name).expanduser()
    try:
        with path.open("rb") as file:
            return file.read(MAX_PICTURE_BYTES + 1)
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise DataError(
            f"the image of {place} cannot be read: {path} ({reason}); correct the path"
        ) from None
