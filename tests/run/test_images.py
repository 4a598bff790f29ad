import io
import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image as Pillow

from ycore.errors import DataError, RunFolderError
from ycore.run.files import MAX_PICTURE_PIXELS, ImageStore, png_of


def picture(
    mode: str = "RGB", size: tuple[int, int] = (4, 3), colour: object = None
) -> Pillow.Image:
    return Pillow.new(mode, size, colour or 0)  # type: ignore[arg-type]


def saved(made: Pillow.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    made.save(buffer, kind, **options)
    return buffer.getvalue()


def test_a_picture_is_kept_once_and_comes_back_by_its_hash(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images")
    data = png_of(picture(colour=(1, 2, 3)))
    first, again = store.put(data, "row 0"), store.put(data, "row 9")
    assert first == again
    assert (first.width, first.height) == (4, 3)
    assert [path.name for path in (tmp_path / "images").iterdir()] == [first.sha256]
    assert store.open(first.sha256).getpixel((3, 2)) == (1, 2, 3)
    assert store.url(first.sha256).startswith("data:image/png;base64,")


def test_a_picture_that_need_not_last_is_whole_all_the_same(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images")
    data = png_of(picture(colour=(9, 9, 9)))
    kept = store.put(data, "drawn", durable=False)
    assert store.data(kept.sha256) == data
    assert [path.name for path in (tmp_path / "images").iterdir()] == [kept.sha256]


def test_without_a_folder_a_picture_is_only_checked(tmp_path: Path) -> None:
    assert ImageStore(None).put(png_of(picture()), "row 0").width == 4
    assert list(tmp_path.iterdir()) == []


def test_a_turned_photograph_is_seen_upright() -> None:
    exif = Pillow.Exif()
    exif[274] = 6  # a quarter of a turn
    image = ImageStore(None).put(saved(picture(), "JPEG", exif=exif), "row 0")
    assert (image.width, image.height) == (3, 4)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA"])
def test_other_modes_become_rgb(mode: str, tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    assert store.open(store.put(saved(picture(mode), "PNG"), "row 0").sha256).mode == "RGB"


def bomb(width: int, height: int) -> bytes:
    """A PNG file of a few bytes that says it has so many pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data))
            + name
            + data
            + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no picture of a known kind"),
        (b"#!/bin/sh", "no picture of a known kind"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "no picture of a known kind"),
        (png_of(picture(size=(40, 40)))[:-30], "is damaged"),
        (bomb(5000, 5000), f"5000 x 5000 pixels, {MAX_PICTURE_PIXELS} at most"),
        (bomb(60000, 60000), f"more than {MAX_PICTURE_PIXELS} pixels"),
        (saved(picture("I;16"), "PNG"), "more than 8 bits"),
        (
            saved(picture(), "GIF", save_all=True, append_images=[picture(colour=(9, 9, 9))]),
            "animated",
        ),
    ],
)
def test_what_is_no_plain_picture_is_refused_in_one_line(
    data: bytes, says: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=says) as caught:
        ImageStore(tmp_path / "images").put(data, "row 7 of pairs.jsonl")
    assert "row 7 of pairs.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "images").exists()


def test_a_changed_or_missing_file_is_named(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    kept = store.put(png_of(picture()), "row 0").sha256
    store.path(kept).write_bytes(png_of(picture(colour=(1, 1, 1))))
    with pytest.raises(RunFolderError, match="was changed"):
        store.open(kept)
    store.path(kept).unlink()
    with pytest.raises(RunFolderError, match="cannot be read"):
        store.open(kept)
