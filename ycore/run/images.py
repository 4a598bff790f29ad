"""Pictures by reference: each is in the run folder once, named by the sha256 of its file, and everything else has that.

Prompts, the journal and messages between processes hold `Image` values; pixels are read where they are used.
"""

import base64
import hashlib
import io
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from ycore.errors import ConfigError, DataError
from ycore.run.files import make_folder, read_named, write_bytes_atomic
from ycore.types import Image

MAX_BYTES = 32 << 20
MAX_PIXELS = 1 << 24
"""4096 x 4096. A small file may stand for more pixels than the memory holds."""

_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
_DEPTHS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")


class ImageStore:
    """Example: `image = store.put(path.read_bytes(), "row 3")`, and later `store.open(image.sha256)`.

    Args:
        folder: where the files go, `RunFolder.images`; None where a picture is only checked.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def put(self, data: bytes, place: str, *, durable: bool = True) -> Image:
        """Keep a picture's file, unless it is there; DataError, with its `place`, where it is no picture of 8 bits.

        `durable`: on the disk on return, at a few milliseconds a picture. What can be drawn again need not be.
        """
        sha256 = hashlib.sha256(data).hexdigest()
        size = _decoded(data, place).size
        if self.folder is not None and not (path := self.path(sha256)).is_file():
            make_folder(self.folder)
            if durable:
                write_bytes_atomic(path, data)
            else:
                partial = path.with_name(f".{sha256}.{os.getpid()}")
                partial.write_bytes(data)
                os.replace(partial, path)
        return Image(sha256, *size)

    def path(self, sha256: str) -> Path:
        """Where the picture's file is."""
        assert self.folder is not None
        return self.folder / sha256

    def data(self, sha256: str) -> bytes:
        """The picture's file; RunFolderError where it is missing, or is no longer what it was."""
        return read_named(self.path(sha256), way_out="resume with the dataset")

    def open(self, sha256: str) -> Any:
        """Return the picture as PIL has it, in RGB, turned upright: every process sees it so."""
        return _decoded(self.data(sha256), sha256[:12])

    def url(self, sha256: str) -> str:
        """Return the picture's pixels as a `data:` URL, for a server."""
        assert self.folder is not None
        return _url(self.folder, sha256)


@lru_cache(maxsize=64)  # a group asks as often as it has completions
def _url(folder: Path, sha256: str) -> str:
    return (
        "data:image/png;base64,"
        + base64.b64encode(png_of(ImageStore(folder).open(sha256))).decode()
    )


def png_of(picture: Any) -> bytes:
    """Return a PIL image as the bytes of a PNG file."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def _decoded(data: bytes, place: str) -> Any:
    """Decode a picture to RGB, upright. A header that says it is too large is refused before anything is unpacked."""
    try:
        from PIL import Image as Pillow
        from PIL import ImageOps
    except ImportError:
        raise ConfigError(
            "pictures need Pillow; install it with `pip install 'ycore[pictures]'`"
        ) from None
    if len(data) > MAX_BYTES:
        raise DataError(
            f"the image of {place} has {len(data) >> 20} MB, {MAX_BYTES >> 20} at most; make it smaller"
        )
    try:
        with Pillow.open(io.BytesIO(data), formats=_FORMATS) as picture:
            problem = _problem_of(picture)
            if problem is None:
                return ImageOps.exif_transpose(picture).convert("RGB")
    except Pillow.DecompressionBombError:
        problem = f"has more than {MAX_PIXELS} pixels; make it smaller"
    except Pillow.UnidentifiedImageError:
        problem = f"is no picture of a known kind ({', '.join(_FORMATS)}); convert or remove it"
    except Exception as error:  # noqa: BLE001 -- decoders of hostile bytes raise errors of every kind
        problem = f"is damaged ({' '.join(str(error).split())[:100] or type(error).__name__}); replace or remove it"
    raise DataError(f"the image of {place} {problem}")


def _problem_of(picture: Any) -> str | None:
    width, height = picture.size
    if width * height > MAX_PIXELS:
        return f"has {width} x {height} pixels, {MAX_PIXELS} at most; make it smaller"
    if getattr(picture, "n_frames", 1) > 1:
        return f"is animated ({picture.n_frames} frames); give one of them"
    if picture.mode not in _DEPTHS:
        return f"has more than 8 bits a channel (mode {picture.mode}); convert it to 8 bits"
    return None
