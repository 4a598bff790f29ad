"""Questions to the model hub that always end: no network, a dead proxy or a slow hub is an answer too.

Not here: the download itself (`fetch`).
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ANSWER_WITHIN_S = 3.0


@dataclass(frozen=True, slots=True)
class HubAnswer:
    """`here`: it exists and may be downloaded. Else `problem` says why not, without a way out."""

    state: Literal["here", "absent", "refused", "unreachable"]
    problem: str = ""
    info: Any = None


def ask_hub(question: Callable[[Any], Any]) -> HubAnswer:
    """Ask `question(HfApi)`, for about three seconds at most."""
    from huggingface_hub import HfApi
    from huggingface_hub.constants import ENDPOINT, is_offline_mode

    if is_offline_mode():
        return HubAnswer("unreachable", "HF_HUB_OFFLINE is set")
    answers: list[HubAnswer] = []
    # A name lookup can hang for longer than any timeout the client knows: a thread can be left behind.
    asking = threading.Thread(target=lambda: answers.append(_ask(question, HfApi())), daemon=True)
    asking.start()
    asking.join(ANSWER_WITHIN_S)
    if not answers:
        return HubAnswer("unreachable", f"{ENDPOINT} did not answer within {ANSWER_WITHIN_S:g} s")
    return answers[0]


def _ask(question: Callable[[Any], Any], api: Any) -> HubAnswer:
    import httpx
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        return HubAnswer("here", info=question(api))
    except HFValidationError as problem:
        return HubAnswer("absent", f"that is not a name the hub can have: {_first_line(problem)}")
    except GatedRepoError:
        return HubAnswer("refused", "it asks you to accept its terms on the hub and to log in (HF_TOKEN)")
    except RepositoryNotFoundError:
        return HubAnswer("absent", "the hub has nothing public of that name")
    except HfHubHTTPError as problem:
        return HubAnswer("unreachable", f"the hub answered {problem.response.status_code}")
    except (httpx.HTTPError, OSError, ValueError) as problem:
        return HubAnswer("unreachable", f"{api.endpoint} cannot be reached: {_first_line(problem)}")


def cached_snapshot(name: str) -> Path | None:
    """The folder in the hub's local cache that holds this model's config, or None. No network."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _first_line(problem: Exception) -> str:
    lines = str(problem).strip().splitlines()
    return lines[0] if lines else type(problem).__name__
