"""Make a planned model real: a local folder with config, tokenizer and safetensors.

Not here: deciding what a name means (`plan`).
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ycore.errors import ModelError
from ycore.models.folder import inspect_folder
from ycore.models.gguf import read_header
from ycore.models.hub import ask_hub, build_once
from ycore.models.names import BUILTIN, BuiltinModel, ModelPlan, download_gguf

_CONVERT_WITHIN_S = 3600
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_UNWANTED = ["onnx/*", "original/*", "runs/*", "checkpoint-*/*"]


def fetch_model(plan: ModelPlan, *, log: Path | None = None) -> Path:
    """The model's folder, downloaded or converted where it must be; `log` takes what the conversion prints."""
    if plan.folder is not None and plan.ready:
        return plan.folder
    if plan.kind == "hub":
        return _download(plan.name, trust_remote_code=plan.trust_remote_code)
    if plan.folder is None:
        raise ModelError(f"nothing is known of where {plan.name} should lie; name the model again")
    if plan.kind == "builtin":
        return _fetch_builtin(BUILTIN[plan.name], plan, log)
    source = Path(os.path.expanduser(plan.name))
    if plan.kind == "adapter":
        return build_once(plan.folder, lambda folder: _in_child("ycore.models.adapter", source, folder, log=log))
    return build_once(plan.folder, lambda folder: convert_gguf(source, folder, log=log))


def convert_gguf(source: Path, folder: Path, *, log: Path | None = None) -> None:
    """A whole model's folder from a GGUF file (`gguf`)."""
    read_header(source)
    _in_child("ycore.models.gguf", source, folder, log=log)


def _in_child(module: str, source: Path, folder: Path, *, log: Path | None) -> None:
    """Run a conversion in a process of its own: its memory is given back and its modules are not loaded here."""
    command = [sys.executable, "-m", module, str(source.absolute()), str(folder.absolute())]
    with tempfile.TemporaryFile() if log is None else log.open("ab+") as output:
        begin = output.seek(0, 2)
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=_CONVERT_WITHIN_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ModelError(f"converting {source} took more than {_CONVERT_WITHIN_S} s; use a smaller model") from None
        output.seek(begin)
        lines = output.read().decode(errors="replace").strip().splitlines()
    if done.returncode != 0:
        said = lines[-1].removeprefix("error: ") if lines else f"exit status {done.returncode}"
        raise ModelError(f"cannot convert {source}: {said}" + ("" if log is None else f" (its output is in {log})"))
    inspect_folder(folder, trust_remote_code=False)


def _fetch_builtin(model: BuiltinModel, plan: ModelPlan, log: Path | None) -> Path:
    if ask_hub(lambda api: api.model_info(model.hub_id, timeout=3.0)).state == "here":
        return _download(model.hub_id, trust_remote_code=False)

    def build(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            convert_gguf(download_gguf(model, Path(temporary)), folder, log=log)

    assert plan.folder is not None
    return build_once(plan.folder, build)


def _download(name: str, *, trust_remote_code: bool) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = [*_FILES, "*.py"] if trust_remote_code else _FILES
    try:
        folder = Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=_UNWANTED))
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as problem:
        reason = str(problem).strip().splitlines()[0]
        raise ModelError(
            f"could not download {name} from the hub: {reason}; try again, or give a local folder"
        ) from None
    inspect_folder(folder, trust_remote_code=trust_remote_code)
    return folder
