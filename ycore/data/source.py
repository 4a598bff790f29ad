"""Read a dataset by its name: a local file, a generated dataset, or a dataset of the hub.

A dataset of the hub is `owner/name`, `owner/name:config`, or `owner/name:folder/file.jsonl` for one file of it.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ycore.data.generated import DIGIT_QUESTIONS, TASKS, gym_table, task_table
from ycore.data.local_files import file_suffix, file_table
from ycore.data.table import Table
from ycore.errors import DataError, nearest
from ycore.models.hub import ANSWER_WITHIN_S, ask_hub, first_line

_NO_HUB_NEEDED = "give a local file (.jsonl, .csv, .parquet), `task:addition` or another task, which need no hub"


def read_table(name: str, *, split: str, seed: int, limit: int | None) -> Table:
    """Return the first `limit` rows of a dataset, at least one.

    Args:
        split: For generated datasets and the hub's; local files have no splits.
        seed: For generated datasets.
    """
    path = Path(os.path.expanduser(name))
    hub_name, colon, _ = name.partition(":")
    is_path = name.startswith((".", "~", "/")) or hub_name.count("/") > 1
    is_path |= file_suffix(path) is not None and not (colon and "/" in hub_name)
    if not name.strip():
        raise DataError(
            "--dataset is empty; give a file, a hub id or a task such as task:addition"
        )
    if name.startswith("task:"):
        table = task_table(name, split=split, seed=seed)
    elif name.startswith("gym:"):
        table = gym_table(name, split=split, seed=seed)
    elif _is_saved(path):
        table = _saved_table(path, split)
    elif is_path or os.path.exists(path):
        table = file_table(path)
    else:
        _refuse_mistyped_schemes(name)
        table = _hub_table(name, split=split, limit=limit)
    if not table.rows:
        raise DataError(f"the dataset {table.name} is empty; a run needs at least one row")
    if limit is None or limit >= len(table.rows):
        return table
    lines = None if table.lines is None else table.lines[:limit]
    return replace(table, rows=[table.rows[number] for number in range(limit)], lines=lines)


def _is_saved(path: Path) -> bool:
    """Tell whether a folder was written by `save_to_disk` of the datasets library."""
    return any(os.path.isfile(path / name) for name in ("dataset_dict.json", "state.json"))


def _saved_table(path: Path, split: str) -> Table:
    from datasets import DatasetDict, load_from_disk

    try:
        rows = load_from_disk(
            path, keep_in_memory=True
        )  # as in `local_files`, nothing is mapped
    except (OSError, ValueError, KeyError) as problem:
        raise DataError(
            f"{path} cannot be read: {first_line(problem)}; write it again with save_to_disk"
        ) from None
    if isinstance(rows, DatasetDict):
        if split not in rows:
            raise DataError(
                f"{path} has the splits {', '.join(rows)}, not {split!r}; take one of them"
            )
        rows = rows[split]
    return Table(str(path), _undecoded(rows).with_format(None), tuple(rows.column_names))


def _refuse_mistyped_schemes(name: str) -> None:
    scheme, colon, rest = name.partition(":")
    if colon and "/" not in scheme and (near := nearest(scheme, ("task", "gym"), limit=1)):
        near = near.split("'")[1]
        raise DataError(f"no dataset {name!r}; did you mean {f'{near}:{rest}'!r}?")
    if name.partition("?")[0] in (*TASKS, *DIGIT_QUESTIONS):
        raise DataError(f"no dataset {name!r}; did you mean {f'task:{name}'!r}?")


def _hub_table(text: str, *, split: str, limit: int | None) -> Table:
    """Return the rows of one split of a hub dataset; a hub that does not answer within three seconds is offline."""
    name, _, config = text.partition(":")
    answer = ask_hub(lambda api: api.dataset_info(name, timeout=ANSWER_WITHIN_S))
    if answer.state in ("absent", "refused"):
        raise DataError(
            f"no dataset file and no hub dataset {name!r} that can be loaded: {answer.problem}; {_NO_HUB_NEEDED}"
        )
    is_offline = answer.state == "unreachable"
    if file_suffix(Path(config)) is not None:
        return replace(
            file_table(_hub_file(name, config, unreachable=answer.problem)), name=text
        )
    if is_offline and not _is_cached(name):
        raise DataError(
            f"no dataset file {name!r}, and the hub cannot be reached to look for one: {answer.problem}; "
            f"{_NO_HUB_NEEDED}"
        )
    rows = _load(name, config or None, split, offline=is_offline)
    if limit is not None:
        rows = rows.select(range(min(limit, len(rows))))
    return Table(
        name=text, rows=_undecoded(rows).with_format(None), columns=tuple(rows.column_names)
    )


def _hub_file(name: str, file: str, *, unreachable: str) -> Path:
    """Return a file of a hub dataset in the hub's cache.

    Args:
        unreachable: Why the hub cannot be reached; empty where it can.
    """
    import httpx
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(
            hf_hub_download(name, file, repo_type="dataset", local_files_only=bool(unreachable))
        )
    except (HfHubHTTPError, httpx.HTTPError, OSError, ValueError) as problem:
        why = unreachable or first_line(problem)
        raise DataError(
            f"no file {file} of the hub dataset {name}: {why}; {_NO_HUB_NEEDED}"
        ) from None


def _undecoded(rows: Any) -> Any:
    """Return the rows with their pictures as bytes, which `row_images` decodes by its own rules."""
    from datasets import Image, List

    for name, feature in rows.features.items():
        if isinstance(feature, Image):
            rows = rows.cast_column(name, Image(decode=False))
        elif isinstance(feature, List) and isinstance(feature.feature, Image):
            rows = rows.cast_column(name, List(Image(decode=False)))
    return rows


def _is_cached(name: str) -> bool:
    """Whether the datasets library has built some configuration of this dataset before."""
    from datasets import config
    from datasets.naming import camelcase_to_snakecase

    owner, _, last = name.rpartition("/")
    folder = "___".join(part for part in (owner, camelcase_to_snakecase(last)) if part)
    cached = config.HF_DATASETS_CACHE / folder
    return os.path.isdir(cached) and any(cached.glob("*/*/*"))


def _load(name: str, config: str | None, split: str, *, offline: bool) -> Any:
    import datasets
    from datasets.exceptions import DatasetsError
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    if offline:  # else the library tries the hub again, and waits far longer
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        return datasets.load_dataset(name, config, split=split)
    except (DatasetsError, ValueError, RuntimeError, OSError) as problem:
        reason = " ".join(str(problem).split())[:300]
        raise DataError(
            f"the hub dataset {name}{f':{config}' if config else ''}, split {split}: {reason}"
        ) from None
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before
