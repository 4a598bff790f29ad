"""Kinds of engines: what each can do, and which one a run takes.

A new kind is an entry of `KINDS` and its name in `EngineSettings.kind`. Nothing outside this room compares names of
kinds: the others ask the object.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from ycore.engine.vllm_plugin import SERVED
from ycore.errors import ConfigError

INSTALL_VLLM_ON_CPU = "pip install uv && uv pip install --torch-backend cpu 'ycore[cpu]'"
INSTALL_VLLM_ON_GPU = "pip install 'ycore[gpu]'"
INSTALL_VLLM = f"{INSTALL_VLLM_ON_CPU}, on a GPU {INSTALL_VLLM_ON_GPU}"


@dataclass(frozen=True)
class EngineKind:
    """One kind of engine.

    Attributes:
        name: The value of `engine.kind`.
        note: A line about it for people.
        has_servers: Whether the launcher starts engines as processes of their own. All ranks of a machine share them,
            they are sent the policy's weights, they report log-probabilities, they can give back unfinished
            completions, and the models that score are served beside them. Otherwise the trainer's own model writes.
    """

    name: str
    note: str
    has_servers: bool = False


VLLM = EngineKind("vllm", "generating with vLLM", has_servers=True)
TRANSFORMERS = EngineKind(
    "transformers", "generating with transformers in the trainer's process"
)
REPLAY = EngineKind("replay", TRANSFORMERS.note)
"""Rounds are read from another run's journal; what is evaluated is written by the trainer's model."""
KINDS: Mapping[str, EngineKind] = {kind.name: kind for kind in (VLLM, TRANSFORMERS, REPLAY)}


def choose_kind(
    requested: str, *, family: str | None = None, is_installed: bool | None = None
) -> tuple[EngineKind, str]:
    """Return the kind that generates on a machine, by `engine.kind`, and a note about it for people.

    `auto` takes vLLM where it can serve the policy, and transformers otherwise.

    Args:
        family: The `model_type` of a policy that reads pictures; None for one that reads text only.
        is_installed: Whether vLLM is installed there; None looks on this machine.

    Raises:
        ConfigError: The kind that is named cannot generate here.
    """
    kind = VLLM if requested == "auto" else KINDS[requested]
    is_installed = is_vllm_installed() if is_installed is None else is_installed
    problem = None
    if kind is VLLM and family not in (None, *SERVED):
        problem = (
            "of models that see, vLLM's engines were held to the trainer for "
            f"{', '.join(SERVED)}, not for {family}"
        )
    elif kind is VLLM and not is_installed:
        problem = f"vLLM is not installed ({INSTALL_VLLM})"
    if problem is None:
        return kind, kind.note
    if requested != "auto":
        raise ConfigError(f"engine.kind is {requested}: {problem}; take --engine transformers")
    return TRANSFORMERS, f"{TRANSFORMERS.note}, which is slower: {problem}"


def is_vllm_installed() -> bool:
    return find_spec("vllm") is not None
