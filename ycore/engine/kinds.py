"""Kinds of engines: what each can do, how its servers start, and how a rank reaches it.

A new kind is a subclass of `EngineKind`, an entry of `KINDS`, and its name in `EngineSettings.kind`. Nothing outside
this room compares names of kinds: the others ask the object.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ycore.config.schema import EngineSettings
from ycore.engine import Engine, SamplingParams, WeightSource
from ycore.engine import commands as vllm_commands
from ycore.engine.commands import EngineSpec
from ycore.engine.server import restart_timeout_s
from ycore.engine.sight import Sight
from ycore.engine.vllm_plugin import SERVED
from ycore.errors import ConfigError

INSTALL_VLLM_ON_CPU = "pip install uv && uv pip install --torch-backend cpu 'ycore[cpu]'"
INSTALL_VLLM_ON_GPU = "pip install 'ycore[gpu]'"
INSTALL_VLLM = f"{INSTALL_VLLM_ON_CPU}, on a GPU {INSTALL_VLLM_ON_GPU}"


class EngineKind:
    """One kind of engine.

    Attributes:
        name: The value of `engine.kind`.
        note: A line about it for people.
        has_servers: Whether the launcher starts engines as processes of their own. All ranks of a machine share them,
            they are sent the policy's weights, they report log-probabilities, they can give back unfinished
            completions, and the models that score are served beside them. Otherwise the trainer's own model writes.
    """

    name = ""
    note = ""
    has_servers = False

    def is_installed(self) -> bool:
        return True

    def problem(self, family: str | None, *, is_installed: bool) -> str | None:
        """Return why a machine cannot generate with this kind, or None.

        Args:
            family: The `model_type` of a policy that reads pictures; None for one that reads text only.
        """
        return None

    # A kind with servers:

    def command(self, engine: EngineSpec) -> list[str]:
        """Return the command line of a server. It listens on the spec's socket and answers `/health`."""
        raise NotImplementedError

    def environment(self, engine: EngineSpec) -> dict[str, str]:
        """Return the whole environment of a server."""
        raise NotImplementedError

    def client(
        self,
        name: str,
        socket: Path,
        sampling: SamplingParams,
        settings: EngineSettings,
        *,
        sleeps: bool,
        is_home: bool,
        sight: Sight | None,
        source: WeightSource | None,
    ) -> Engine:
        """Return this rank's client of the policy's server behind `socket`.

        Args:
            sleeps: Whether this client puts the engine to sleep and wakes it.
            is_home: Whether this client sends the weights of a new version.
            source: The policy's weights in this process, where they are not sent as files (`engine.sync=ipc`).
        """
        raise NotImplementedError

    # A kind without:

    def in_process(
        self, model: Any, tokenizer: Any, sampling: SamplingParams, sight: Sight | None
    ) -> Engine:
        """Return an engine that writes with `model` in this process."""
        raise NotImplementedError


class VllmKind(EngineKind):
    """vLLM's own server, one for each part of a slot."""

    name = "vllm"
    has_servers = True
    note = "generating with vLLM"

    def is_installed(self) -> bool:
        return is_vllm_installed()

    def problem(self, family: str | None, *, is_installed: bool) -> str | None:
        if family is not None and family not in SERVED:
            return (
                "of models that see, vLLM's engines were held to the trainer for "
                f"{', '.join(SERVED)}, not for {family}"
            )
        return None if is_installed else f"vLLM is not installed ({INSTALL_VLLM})"

    def command(self, engine: EngineSpec) -> list[str]:
        return vllm_commands.engine_command(engine)

    def environment(self, engine: EngineSpec) -> dict[str, str]:
        return vllm_commands.engine_environment(engine)

    def client(
        self,
        name: str,
        socket: Path,
        sampling: SamplingParams,
        settings: EngineSettings,
        *,
        sleeps: bool,
        is_home: bool,
        sight: Sight | None,
        source: WeightSource | None,
    ) -> Engine:
        from ycore.engine.vllm_engine import VllmEngine

        return VllmEngine(
            name,
            socket,
            sampling,
            request_timeout_s=settings.request_timeout_s,
            restart_timeout_s=restart_timeout_s(settings),
            min_verified=settings.min_verified,
            sleeps=sleeps,
            is_home=is_home,
            sight=sight,
            source=source,
        )


class TransformersKind(EngineKind):
    """`model.generate` in the trainer's process."""

    name = "transformers"
    note = "generating with transformers in the trainer's process"

    def in_process(
        self, model: Any, tokenizer: Any, sampling: SamplingParams, sight: Sight | None
    ) -> Engine:
        from ycore.engine.transformers_engine import TransformersEngine

        return TransformersEngine(model, tokenizer, sampling, sight)


class ReplayKind(TransformersKind):
    """Rounds are read from another run's journal; what is evaluated is written by the trainer's model."""

    name = "replay"


VLLM = VllmKind()
TRANSFORMERS = TransformersKind()
REPLAY = ReplayKind()
KINDS: Mapping[str, EngineKind] = {kind.name: kind for kind in (VLLM, TRANSFORMERS, REPLAY)}


def choose_kind(
    requested: str, *, family: str | None = None, is_installed: bool | None = None
) -> tuple[EngineKind, str]:
    """Return the kind that generates on a machine, by `engine.kind`, and a note about it for people.

    `auto` takes vLLM where it can serve the policy, and transformers otherwise.

    Args:
        family: The `model_type` of a policy that reads pictures; None for one that reads text only.
        is_installed: Whether the kind is installed there; None looks on this machine.

    Raises:
        ConfigError: The kind that is named cannot generate here.
    """
    kind = VLLM if requested == "auto" else KINDS[requested]
    is_installed = kind.is_installed() if is_installed is None else is_installed
    problem = kind.problem(family, is_installed=is_installed)
    if problem is None:
        return kind, kind.note
    if requested != "auto":
        raise ConfigError(f"engine.kind is {requested}: {problem}; take --engine transformers")
    return TRANSFORMERS, f"{TRANSFORMERS.note}, which is slower: {problem}"


def is_vllm_installed() -> bool:
    return find_spec("vllm") is not None
