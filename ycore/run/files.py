"""A run's files: their paths, and its id; how a file is whole or not there, after a kill or a loss of power.

A JSON file is written beside its place, brought to the disk and renamed: a reader never sees half of it. A sealed file
is two lines of JSON, a header and a body, and the header has the body's sha256: damage is found.

Pictures are by reference: each is in the run folder once, named by the sha256 of its file. Prompts, the journal and
messages between processes hold `Image` values; pixels are read where they are used.

Every file that ycore did not write itself is read through `read_regular`, and its JSON or YAML through `check_plain`: what
is no file, or is too large, too deep or too long a number, is a ValueError in a few words.
"""

import base64
import errno
import hashlib
import io
import json
import math
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

from ycore.errors import ConfigError, DataError, RunError, RunFolderError
from ycore.types import Image, JsonObject, Record

MAX_SETTINGS_BYTES = 64 * 2**20
"""A file of settings, such as a model's config.json, has no more; its weights' index is the largest."""

_MAX_DEPTH = 100
_MAX_VALUES = 5_000_000
_MAX_INTEGER = 10**31
"""No setting is larger (some tokenizers' greatest length is 10**30), and products of several still fit a float."""

_MAX_LINE_BYTES = 64 * 2**20

_FULL_NUMBERS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FULL_IN_WORDS = (
    "No space left on device",
    "StorageFull",
    "Disk quota exceeded",
    "File too large",
)


def check_regular(path: Path) -> int:
    """Return a file's size in bytes; ValueError for a folder, a FIFO or a device, which could be read without end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a FIFO, a socket or a device"
        raise ValueError(f"it is {kind} and not a file")
    return status.st_size


def read_regular(path: Path, *, max_bytes: int) -> bytes:
    """Return a file's content; ValueError where it is no file, or has more than `max_bytes`."""
    size = check_regular(path)
    if size > max_bytes:
        raise ValueError(f"it has {size} bytes, and at most {max_bytes} are read")
    return path.read_bytes()


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text, after `check_plain`; ValueError says what is wrong."""
    try:
        return check_plain(json.loads(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_plain(value: Any, *, max_values: int = _MAX_VALUES) -> Any:
    """Return what JSON or YAML gave; ValueError where it is too deep, too much or has an endless number.

    A few lines of YAML can repeat a list by its name until it is larger than the memory, or contain it in itself.
    """
    level = [value]
    num_values = 1
    for _ in range(_MAX_DEPTH):
        if any(type(item) is int and abs(item) > _MAX_INTEGER for item in level):
            raise ValueError("it has an integer beyond 10**31")
        inner = [item for item in level if isinstance(item, dict | list)]
        if not inner:
            return value
        num_values += sum(map(len, inner))
        if num_values > max_values:
            raise ValueError(f"it has more than {max_values} values")
        level = []
        for item in inner:
            level.extend(item.values() if isinstance(item, dict) else item)
    raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep")


def read_object(path: Path) -> JsonObject:
    """Return the JSON object in a file of settings; ValueError says what is wrong."""
    value = parse_json(read_regular(path, max_bytes=MAX_SETTINGS_BYTES))
    if not isinstance(value, dict):
        raise ValueError(f"it must hold a JSON object, not {type(value).__name__}")
    return value


def read_json(path: Path) -> JsonObject:
    """Return the object in `path`; RunFolderError where the file is missing or holds none."""
    try:
        return read_object(path)
    except FileNotFoundError:
        inside = sorted(file.parent.name for file in path.parent.glob(f"*/{path.name}"))
        way_out = "name the folder that --output named"
        if inside:
            way_out = f"name one of those in it, {', '.join(inside[:5])}"
        raise RunFolderError(
            f"{path.parent} has no {path.name}, so it is no run's folder; {way_out}"
        ) from None
    except ValueError as error:
        raise RunFolderError(
            f"{path} is not JSON ({error}); it was not written by ycore, or was changed"
        ) from None


def write_json_atomic(path: Path, value: Any) -> None:
    """Replace `path` by `value` as JSON without NaN (see `json_safe`); a kill leaves the old file or the new one."""
    write_bytes_atomic(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def named_by_content(path: Path, data: bytes) -> Path:
    """Return `path` with the beginning of the sha256 of `data` in its name, so that it never takes other data's place."""
    return path.with_name(f"{path.stem}-{hashlib.sha256(data).hexdigest()[:8]}{path.suffix}")


def read_named(path: Path, *, way_out: str) -> bytes:
    """Return a file that has its sha256 for a name; RunFolderError, with the way out, where it is missing or changed."""
    try:
        data = path.read_bytes()
    except OSError as problem:
        raise RunFolderError(f"{path} cannot be read: {problem}; {way_out}") from None
    if hashlib.sha256(data).hexdigest() != path.name:
        raise RunFolderError(
            f"{path} was changed: its sha256 is not its name; remove it, and {way_out}"
        )
    return data


def write_bytes_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace `path` by `data`, readable by its owner only; a kill leaves the old file or the new one.

    `durable`: on the disk on return, so that a loss of power leaves one of both too.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    if durable:
        sync(path.parent)


def seal(head: Record, content: Any) -> bytes:
    """Return a sealed file: `head` with the body's sha256, and `content` as the body."""
    body = json.dumps(content).encode()
    sealed_head = json.dumps({**head, "sha256": hashlib.sha256(body).hexdigest()}).encode()
    return b"".join([sealed_head, b"\n", body, b"\n"])


def unseal(data: bytes, *, schema: int) -> tuple[JsonObject, Any]:
    """Return header and content of a sealed file; ValueError says in a few words what is wrong with it.

    Args:
        schema: what the header must have under that name.
    """
    first, _, body = data.partition(b"\n")
    body = body.removesuffix(b"\n")
    try:
        head = json.loads(first)
    except (ValueError, RecursionError):
        raise ValueError("its first line is not JSON") from None
    if not isinstance(head, dict) or head.get("schema") != schema:
        raise ValueError(f"its schema is not {schema}")
    if hashlib.sha256(body).hexdigest() != head.get("sha256"):
        raise ValueError("its sha256 is not the one that was written")
    try:
        return head, json.loads(body)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def json_safe(value: Any) -> Any:
    """Return `value` with None for every NaN and infinity, which JSON cannot express."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return value


def sync(path: Path) -> None:
    """Bring a file to the disk, or a folder: a rename lasts only once the folder that holds the name is there too."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Bring everything in a folder, and the folder's name, to the disk."""
    for path in [*folder.rglob("*"), folder, folder.parent]:
        if not path.is_symlink():
            sync(path)


def make_folder(path: Path) -> None:
    """Make a folder and those above it where they are missing, so that they are there after a loss of power too."""
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def is_disk_full(error: BaseException) -> bool:
    """Whether a write failed for lack of space; libraries wrap the system's error, or keep only its words."""
    cause: BaseException | None = error
    while cause is not None:
        is_full = isinstance(cause, OSError) and cause.errno in _FULL_NUMBERS
        if is_full or any(words in str(cause) for words in _FULL_IN_WORDS):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


_WAYS_OUT = {
    **dict.fromkeys(_FULL_NUMBERS, "make room"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "make its place writable"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "allow more open files (ulimit -n)"),
    **dict.fromkeys((errno.ENOMEM, errno.EAGAIN), "leave it more memory and processes"),
    errno.ENAMETOOLONG: "choose a shorter name",
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.ESTALE), "put back what was moved"),
}


def as_run_error(error: OSError) -> RunError:
    """Return the error that ends a run whose file failed."""
    return RunError(f"{file_problem(error)}, and go on with --resume")


def file_problem(error: OSError) -> str:
    """Say which file failed, why, and what helps, in one line."""
    reason = error.strerror or str(error) or type(error).__name__
    path = error.filename2 or error.filename
    file = f"{path} cannot be used" if path else "a file cannot be written"
    if is_disk_full(error):
        file = "no room left on the disk"
    way_out = _WAYS_OUT.get(error.errno or 0, "look at the disk and its rights")
    return f"{file} ({reason}); {way_out}"


def read_tail(path: Path, num_bytes: int, *, begin: int = 0) -> bytes:
    """Return the last bytes of a file, so many at most and none of them before `begin`."""
    with path.open("rb") as file:
        file.seek(max(begin, file.seek(0, os.SEEK_END) - num_bytes))
        return file.read()


class LineFollower:
    """Reads a file while others append to it: each whole line once.

    Args:
        path: The file; it may be missing, and may be replaced by another.
        tail_bytes: How far before the end of a file a look begins at most, so that one after a long time takes no more
            memory than others.
    """

    def __init__(self, path: Path, *, tail_bytes: int = 2**63) -> None:
        self._path = path
        self._tail_bytes = tail_bytes
        self._inode = self._offset = 0
        self.num_lines = 0
        """Lines read of the file that is there now."""

    def read(self) -> list[bytes]:
        """Return the lines completed since the last call."""
        try:
            check_regular(self._path)
            file = self._path.open("rb")
        except (FileNotFoundError, ValueError):
            return []
        with file:
            inode = os.fstat(file.fileno()).st_ino
            size = file.seek(0, os.SEEK_END)
            if inode != self._inode or size < self._offset:
                self._inode = inode
                self._offset = self.num_lines = 0
            self._offset = max(self._offset, size - self._tail_bytes)
            file.seek(self._offset)
            lines = []
            for line in iter(lambda: file.readline(_MAX_LINE_BYTES), b""):
                if len(line) == _MAX_LINE_BYTES:
                    # ycore did not write this; the rest is not read.
                    self._offset = size
                    lines.append(b"?")
                    break
                if not line.endswith(b"\n"):
                    break  # it is still being written
                self._offset += len(line)
                lines.append(line.removesuffix(b"\n"))
        self.num_lines += len(lines)
        return lines


def open_private(path: Path) -> TextIO:
    """Open a file for text at its end; whoever makes it is the only one who can read it."""
    return open(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8"
    )


def make_private(path: Path) -> None:
    """Make `path` a folder of mode 0700; RunFolderError where it is a link or another user's, who guessed its name."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise RunFolderError(
            f"{path} is a link or another user's; remove it, or choose another --output"
        )
    path.chmod(0o700)


LOCK = ".lock"

ALLOCATOR = "allocator"
"""The name of the allocator's process, log and socket, on a machine with several ranks."""

TRACKER_GROUP = "WANDB_RUN_GROUP"
"""wandb's own environment variable for runs that belong together."""


class RunFolder:
    """The files of a run: `RunFolder(Path("runs/quickstart")).metrics` is `runs/quickstart/metrics.jsonl`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lock = root / LOCK
        self._run_id: str | None = None
        self.config = root / "run.json"
        # Fingerprints of the rows, the model and the reward files that the run began with.
        self.identity = root / "identity.json"
        self.engines = root / "engines.json"  # the launcher writes it for the trainer
        self.metrics = root / "metrics.jsonl"
        self.trace = root / "trace.json"
        self.summary = root / "summary.json"
        # Completions to the same few prompts, before and after training.
        self.samples = root / "samples.json"
        # Measured on held-out rows before and after training, and for the best model.
        self.held_out = root / "held_out.json"
        self.curve = root / "curve.png"
        self.checkpoints = root / "checkpoints"
        # The rounds since the oldest checkpoint that is kept, or all of them.
        self.journal = root / "journal"
        self.images = root / "images"  # every picture once, named by its sha256
        # Denoising paths of pictures that a flow model drew, named by their sha256.
        self.trajectories = root / "trajectories"
        self.pictures = (
            root / "pictures.png"
        )  # drawn from the same noise before and after training
        self.model = root / "model"
        self.best = (
            root / "best"
        )  # the model that an evaluation found best, where the run keeps it
        self.logs = root / "logs"
        # Touched on every machine when a step begins; not there while the trainer is still starting.
        self.step_began = root / "step_began"
        # What the trainer, or who is in its place, is busy with beside its steps.
        self.work = root / "work.json"

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    @property
    def run_id(self) -> str:
        """The name of the run's shared memory and the mark of its processes, which the folder's lock file keeps.

        The id is random and not made from the path: two mount namespaces (a private /tmp, a container) show two folders
        under one path. It stays the folder's from resume to resume, because what a killed run has left is found by it.
        A copy of the folder does not have it: the copy's resume would end the original's processes. Before a run has
        claimed the folder, nothing has the id, and it follows from the path.
        """
        if self._run_id is None:  # kept, should the folder be removed while the run goes on
            self._run_id = read_run_id(self.lock)
        return self._run_id or hashlib.sha256(os.fsencode(self.root.resolve())).hexdigest()[:12]

    @property
    def temporary(self) -> Path:
        """The folder of the engines' temporary files and sockets; short, because a socket's path must be."""
        return Path(tempfile.gettempdir()) / f"ycore-{self.run_id}"

    @property
    def sockets(self) -> Path:
        """The 0700 folder of the run's sockets: inside the run folder, or the temporary one where that path is long."""
        # With a name in it, a path has at most 100 of the 108 bytes that the kernel allows.
        inside = self.root.resolve() / "sockets"
        return inside if len(os.fsencode(inside)) <= 80 else self.temporary

    def socket(self, engine: str) -> Path:
        return self.sockets / f"{engine}.sock"

    @property
    def shared_memory(self) -> Path:
        """The folder in which weights pass from trainer to engines: in memory where the machine offers it."""
        base = Path("/dev/shm")
        return base / f"ycore-{self.run_id}" if base.is_dir() else self.root / "weights"


def read_run_id(lock: Path) -> str | None:
    """Return the id in a lock file; None where there is none, or where the file is a copy of another folder's."""
    try:
        with lock.open("rb") as file:
            return _read(file.fileno())
    except OSError:
        return None


def keep_run_id(descriptor: int) -> None:
    """Write a new id into an open lock file where there is none."""
    if _read(descriptor) is None:
        record = {"run_id": secrets.token_hex(6), **_file_of(descriptor)}
        data = json.dumps(record).encode() + b"\n"
        os.pwrite(descriptor, data, 0)  # in place, because the lock is on this very file
        os.ftruncate(descriptor, len(data))


def _read(descriptor: int) -> str | None:
    try:
        record: JsonObject = json.loads(os.pread(descriptor, 4096, 0))
        run_id = str(record.pop("run_id"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return run_id if record == _file_of(descriptor) else None


def _file_of(descriptor: int) -> dict[str, int]:
    """Identify the file itself: a copy has another inode."""
    status = os.fstat(descriptor)
    return {"device": status.st_dev, "inode": status.st_ino}


@contextmanager
def tracker_group(name: str) -> Iterator[None]:
    """Make the runs that start meanwhile one group in trackers, unless the user has named another."""
    is_set = TRACKER_GROUP in os.environ
    os.environ.setdefault(TRACKER_GROUP, name)
    try:
        yield
    finally:
        if not is_set:
            del os.environ[TRACKER_GROUP]


MAX_PICTURE_BYTES = 32 << 20
MAX_PICTURE_PIXELS = 1 << 24
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
            write_bytes_atomic(path, data, durable=durable)
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


NO_IMAGES = ImageStore(None)
"""Checks pictures, and keeps none."""


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
    if len(data) > MAX_PICTURE_BYTES:
        raise DataError(
            f"the image of {place} has {len(data) >> 20} MB, {MAX_PICTURE_BYTES >> 20} at most; make it smaller"
        )
    try:
        with Pillow.open(io.BytesIO(data), formats=_FORMATS) as picture:
            problem = _problem_of(picture)
            if problem is None:
                return ImageOps.exif_transpose(picture).convert("RGB")
    except Pillow.DecompressionBombError:
        problem = f"has more than {MAX_PICTURE_PIXELS} pixels; make it smaller"
    except Pillow.UnidentifiedImageError:
        problem = f"is no picture of a known kind ({', '.join(_FORMATS)}); convert or remove it"
    except Exception as error:  # noqa: BLE001 -- decoders of hostile bytes raise errors of every kind
        problem = f"is damaged ({' '.join(str(error).split())[:100] or type(error).__name__}); replace or remove it"
    raise DataError(f"the image of {place} {problem}")


def _problem_of(picture: Any) -> str | None:
    width, height = picture.size
    if width * height > MAX_PICTURE_PIXELS:
        return f"has {width} x {height} pixels, {MAX_PICTURE_PIXELS} at most; make it smaller"
    if getattr(picture, "n_frames", 1) > 1:
        return f"is animated ({picture.n_frames} frames); give one of them"
    if picture.mode not in _DEPTHS:
        return f"has more than 8 bits a channel (mode {picture.mode}); convert it to 8 bits"
    return None
