"""Ask the hub with a time limit, and cache the models that ycore builds.

No network, a dead proxy or a slow hub is an answer too: asking always ends.
"""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ycore.errors import ModelError

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
