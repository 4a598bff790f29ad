"""Resume a run: the rounds of its journal on disk, its checkpoints, and the one that it starts from.

A checkpoint is whole or not there: written beside, flushed, listed in a manifest, then renamed into place. All ranks
publish one together or not at all, and none without room on the disk.

checkpoints/.saving-checkpoint-8/       being written; cleared at the next start
checkpoints/checkpoint-8/manifest.json  written last, sealed: every file with its size and sha256
checkpoints/damaged-checkpoint-6/       did not verify; passed over, never deleted
journal/round-000007-rank-0.json    two lines of JSON: a header with the sha256 of the second, and the round
"""

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError

from ycore.errors import ConfigError, RunError, RunFolderError, YcoreError
from ycore.run.claim import (
    Claim,
    Resume,
    changes,
    check_claim,
    check_contents,
    in_words,
    write_description,
)
from ycore.run.files import (
    MAX_SETTINGS_BYTES,
    RunFolder,
    is_disk_full,
    make_folder,
    read_regular,
    seal,
    sync,
    sync_tree,
    unseal,
    write_bytes_atomic,
)
from ycore.run.text import Say
from ycore.run.work import working

SCHEMA = 2
MIN_KEPT = 2  # checkpoints that are kept whatever the settings say: one may turn out damaged

_MANIFEST = "manifest.json"
_PREFIX = "checkpoint-"
_SPARE = 1.1  # of the last checkpoint's size must be free for the next one
_SAVING = ".saving-"
_DROPPING = ".dropping-"
_OPTIMIZER = "optimizer.pt"  # whole: one state for all ranks
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".distcp"}
"""Suffixes of a model's weights, or of the shards of a model and its optimizer."""


class Fingerprint(BaseModel):
    """Size and sha256 of a file as it was written."""

    model_config = ConfigDict(strict=True, extra="forbid")

    bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Manifest(BaseModel):
    """The files of a checkpoint; their names are relative to its folder."""

    model_config = ConfigDict(strict=True)

    step: Annotated[int, Field(ge=0)]
    world: Annotated[int, Field(ge=1, le=100_000)]
    files: dict[str, Fingerprint]


def checkpoint_of(folder: Path, step: int) -> Path:
    return folder / f"{_PREFIX}{step}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(_PREFIX))


def checkpoints_in(folder: Path) -> list[Path]:
    """Return every published checkpoint, oldest first; none of them is read or verified."""
    paths = folder.glob(f"{_PREFIX}*")
    return sorted(
        (path for path in paths if path.name.removeprefix(_PREFIX).isdigit()), key=step_of
    )


def last_step(folder: Path) -> int:
    """Return the step of the newest published checkpoint, which is not read; 0 where there is none."""
    return max(map(step_of, checkpoints_in(folder)), default=0)


def staging(folder: Path, step: int) -> Path:
    """Return the folder in which to write `checkpoint-STEP` before it is published."""
    return folder / f"{_SAVING}{_PREFIX}{step}"


def publish(folder: Path, step: int, *, world: int) -> Path:
    """Add the manifest to what was staged and give it its name: from here on the checkpoint exists.

    A checkpoint of the same step is replaced: the run went back behind it and came here again.

    Args:
        folder: the run's checkpoints.
        step: optimizer steps taken.
        world: the number of ranks, each of which has written its own state.

    Returns:
        The checkpoint's folder.
    """
    staged = staging(folder, step) / f"{_PREFIX}{step}"
    place = checkpoint_of(folder, step)
    files = sorted(
        path for path in staged.rglob("*") if path.is_file() and path.name != _MANIFEST
    )
    names = [str(path.relative_to(staged)) for path in files]
    listed = dict(zip(names, _fingerprints(files), strict=True))
    write_bytes_atomic(
        staged / _MANIFEST,
        seal({"schema": SCHEMA}, Manifest(step=step, world=world, files=listed).model_dump()),
    )
    sync_tree(staged)
    if place.is_dir():
        _drop(place)
    os.rename(staged, place)
    sync(folder)
    staged.parent.rmdir()
    return place


def read_checkpoint_manifest(checkpoint: Path) -> Manifest:
    """Return a checkpoint's manifest; RunFolderError where it is missing or damaged, or lists too little."""
    path = checkpoint / _MANIFEST
    try:
        _, content = unseal(read_regular(path, max_bytes=MAX_SETTINGS_BYTES), schema=SCHEMA)
        manifest = Manifest.model_validate(content)
    except FileNotFoundError:
        raise RunFolderError(f"{_MANIFEST} is missing, which is written last") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RunFolderError(
            f"{_MANIFEST} is damaged ({where or 'its body'}: {first['msg']})"
        ) from None
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{_MANIFEST} is damaged ({error})") from None
    if lacking := _lacking(manifest):
        raise RunFolderError(f"{_MANIFEST} lists no {lacking}, without which no run goes on")
    return manifest


def _lacking(manifest: Manifest) -> str | None:
    """Return what this checkpoint lacks of that which every checkpoint has, whatever trains it."""
    needed = ["trainer_state.json", "rng_state.pth"]
    if manifest.world > 1:
        needed[1:] = [f"rng_state_{rank}.pth" for rank in range(manifest.world)]
    for name in needed:
        if name not in manifest.files:
            return name
    if any(Path(name).suffix in _WEIGHTS and name not in needed for name in manifest.files):
        return None
    return "weights"


def checkpoint_problem(checkpoint: Path) -> str | None:
    """Say in a few words why a checkpoint does not verify; None where every file is there, whole and unchanged."""
    try:
        manifest = read_checkpoint_manifest(checkpoint)
        if manifest.step != step_of(checkpoint):
            return f"its manifest is of step {manifest.step}"
        return _first_damage(checkpoint, manifest.files)
    except (RunFolderError, OSError) as error:
        return str(error)


def _first_damage(checkpoint: Path, expected: dict[str, Fingerprint]) -> str | None:
    paths = {name: checkpoint / name for name in expected}
    for name, path in paths.items():
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected[name].bytes:
            return (
                f"{name} has {path.stat().st_size} bytes, {expected[name].bytes} were written"
            )
    for name, fingerprint in zip(paths, _fingerprints(paths.values()), strict=True):
        if fingerprint != expected[name]:
            return f"{name} has changed: its sha256 is not the one that was written"
    return None


def newest_whole(folder: Path, *, say: Say, moves: bool = True) -> int:
    """Return the step of the latest checkpoint that verifies; 0 where no checkpoint was ever saved.

    Args:
        say: takes a line for each damaged checkpoint, which is passed over.
        moves: move damaged checkpoints aside.

    Raises:
        RunFolderError: all checkpoints are damaged.
    """
    reasons = []
    for checkpoint in reversed(checkpoints_in(folder)):
        problem = checkpoint_problem(checkpoint)
        if problem is None:
            return step_of(checkpoint)
        kept = f", and kept as {_move(checkpoint, 'damaged-').name}" if moves else ""
        say(f"{checkpoint.name} is damaged ({problem}); passed over{kept}")
        reasons.append(f"{checkpoint.name}: {problem}")
    if reasons:
        raise RunFolderError(
            f"no checkpoint in {folder} verifies ({'; '.join(reasons)}); "
            "begin again with --resume-from 0, or choose another --output"
        )
    return 0


def newest_for(folder: Path, *, world: int, say: Say) -> int:
    """Clear away what a killed save left, and return the step from which `world` ranks go on; 0 is the beginning."""
    clear_leftovers(folder)
    step = newest_whole(folder, say=say)
    if step:
        check_ranks(checkpoint_of(folder, step), world=world)
    return step


def check_ranks(checkpoint: Path, *, world: int) -> None:
    """RunFolderError where another number of ranks saved the checkpoint, and `world` ranks cannot go on from it."""
    manifest = read_checkpoint_manifest(checkpoint)
    if manifest.world == world:
        return
    problem = None
    if controller_file(0) not in manifest.files:
        problem = "a run on given examples keeps its number of ranks"
    elif _OPTIMIZER not in manifest.files:
        problem = "the optimizer's state is in shards, one a rank"
    elif any(name.startswith("round-") for name in manifest.files):
        problem = "later steps still learn from its round, of which each rank has its own part"
    if problem is not None:
        saved = "1 rank" if manifest.world == 1 else f"{manifest.world} ranks"
        raise RunFolderError(
            f"{checkpoint} was saved by {saved}, and this run has {world}; {problem}; go on with --processes "
            f"{manifest.world}, or take another checkpoint with --resume-from (0 is the beginning)"
        )


def controller_file(rank: int) -> str:
    """Return the name of the file in which this rank's controller saves its state."""
    return f"controller-{rank}.json"


def set_aside_after(folder: Path, step: int) -> list[Path]:
    """Move the checkpoints of later steps out of the way: the run goes on from this one."""
    return [
        _move(checkpoint, "aside-")
        for checkpoint in checkpoints_in(folder)
        if step_of(checkpoint) > step
    ]


def drop_oldest(folder: Path, *, keep: int | None) -> None:
    """Remove all but the newest `keep` checkpoints (at least two; None keeps all)."""
    if keep is not None:
        for old in checkpoints_in(folder)[: -max(keep, MIN_KEPT)]:
            _drop(old)


def clear_leftovers(folder: Path) -> None:
    """Remove what a killed save or a killed removal left."""
    for path in [*folder.glob(f"{_SAVING}*"), *folder.glob(f"{_DROPPING}*")]:
        shutil.rmtree(path)


def size_of(checkpoint: Path) -> int:
    """Return the size of all its files, in bytes."""
    return sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())


def _drop(checkpoint: Path) -> None:
    """Rename, then remove: half a checkpoint never has a checkpoint's name."""
    dying = checkpoint.with_name(f"{_DROPPING}{checkpoint.name}")
    shutil.rmtree(dying, ignore_errors=True)
    os.rename(checkpoint, dying)
    sync(checkpoint.parent)
    shutil.rmtree(dying)


def _move(checkpoint: Path, prefix: str) -> Path:
    place = checkpoint.with_name(prefix + checkpoint.name)
    count = 1
    while place.exists():
        count += 1
        place = checkpoint.with_name(f"{prefix}{checkpoint.name}-{count}")
    os.rename(checkpoint, place)
    sync(checkpoint.parent)
    return place


def _fingerprints(files: Iterable[Path]) -> list[Fingerprint]:
    """Hash several files at once, as hashing releases the interpreter."""

    def fingerprint(path: Path) -> Fingerprint:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return Fingerprint(bytes=path.stat().st_size, sha256=sha256)

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(fingerprint, files))


# -- written by all ranks together, and not without room ---------------------------------------------------------------


class OneRank:
    """Stands for an `Accelerator` where there is only one rank."""

    process_index = 0
    num_processes = 1
    is_local_main_process = True

    def wait_for_everyone(self) -> None:
        """Return at once."""


class CheckpointWriter:
    """Example: `with writer.saving(step) as staged: write_into(staged / f"checkpoint-{step}")`.

    Args:
        expected_bytes: rough size of a checkpoint.
        keep: how many checkpoints stay; None keeps all.
        ranks: the `Accelerator` of the ranks that write a checkpoint together.
        prune: drops the rounds of steps before the oldest checkpoint; None keeps them.
    """

    def __init__(
        self,
        home: RunFolder,
        *,
        expected_bytes: int,
        keep: int | None,
        ranks: Any = None,
        prune: Callable[[int], None] | None = None,
    ) -> None:
        make_folder(home.checkpoints)
        self._folder = home.checkpoints
        self._metrics = home.metrics
        self._expected_bytes = expected_bytes
        self._keep = keep
        self.ranks = ranks or OneRank()
        self._prune = prune
        self.saved_step = 0

    @contextmanager
    def saving(self, step: int) -> Iterator[Path]:
        """Give the folder for `checkpoint-STEP`, published on leaving; all ranks come here together."""
        staged = staging(self._folder, step)
        ranks = self.ranks
        leads = ranks.process_index == 0
        try:
            with working("saving a checkpoint"):
                if leads:
                    self._stage(staged, step)
                ranks.wait_for_everyone()
                if not staged.is_dir() and ranks.is_local_main_process:
                    leads = True  # a machine that does not share the run folder publishes what its ranks wrote
                    self._stage(staged, step)
                ranks.wait_for_everyone()
                yield staged
                ranks.wait_for_everyone()
                if leads:
                    sync(self._metrics)  # its steps are not taken again from here on
                    publish(self._folder, step, world=ranks.num_processes)
                    drop_oldest(self._folder, keep=self._keep)
                ranks.wait_for_everyone()
        except YcoreError:
            raise
        except (OSError, RuntimeError, SafetensorError) as error:
            if leads:
                # This makes room for the last lines of logs and summary.
                shutil.rmtree(staged, ignore_errors=True)
            # torch reports that a write failed, but not why.
            is_nearly_full = self._free_bytes() < (self._last_bytes() or self._expected_bytes)
            if is_disk_full(error) or is_nearly_full:
                raise RunError(self._no_room(step)) from error
            raise
        self.saved_step = step
        if self._prune is not None:
            self._prune(step_of(checkpoints_in(self._folder)[0]))

    def check_room(self) -> None:
        """RunError if the disk has no room for the checkpoints that a run keeps."""
        needed = MIN_KEPT * self._expected_bytes
        free = self._free_bytes()
        if self.ranks.process_index == 0 and not checkpoints_in(self._folder) and free < needed:
            raise RunError(
                f"{MIN_KEPT} checkpoints take about {needed / 1e6:.0f} MB, and {self._folder} has {free / 1e6:.0f} MB "
                "free; make room, or choose another --output"
            )

    def _stage(self, staged: Path, step: int) -> None:
        """Make the folder; RunError unless about as much is free as the last checkpoint took."""
        if self._free_bytes() < _SPARE * self._last_bytes():
            raise RunError(self._no_room(step))
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(mode=0o700)

    def _no_room(self, step: int) -> str:
        whole = checkpoints_in(self._folder)
        last = "there is none yet, and the journal holds the rounds"
        if whole:
            last = f"{whole[-1].name} is whole"
        return (
            f"no room for the checkpoint of step {step} in {self._folder} ({self._free_bytes() / 1e6:.1f} MB free); "
            f"{last}: make room, and go on with --resume"
        )

    def _last_bytes(self) -> int:
        return sum(map(size_of, checkpoints_in(self._folder)[-1:]))

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self._folder).free


_ROUND_SCHEMA = 1
_MAX_ROUND_BYTES = 2**33
_ROUND_NAME = re.compile(r"round-(\d+)-rank-(\d+)\.json")


def round_file(journal: Path, step: int, rank: int) -> Path:
    return journal / f"round-{step:06d}-rank-{rank}.json"


def write_round(path: Path, label: Mapping[str, int], content: Mapping[str, Any]) -> None:
    """Write a rank's part of a round: one line of header and one of content, both JSON.

    Args:
        path: see `round_file`.
        label: keys of the header besides the schema and the content's sha256: step, rank, world, seed.
        content: the round, as plain JSON values.
    """
    write_bytes_atomic(path, seal({"schema": _ROUND_SCHEMA, **label}, content))


def read_round(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the header and the round of a file of `write_round`; RunFolderError where it is damaged."""
    try:
        return unseal(read_regular(path, max_bytes=_MAX_ROUND_BYTES), schema=_ROUND_SCHEMA)
    except ValueError as problem:
        raise damaged_round(path, str(problem)) from None


def damaged_round(path: Path, problem: str) -> RunFolderError:
    return RunFolderError(
        f"{path} is damaged ({problem}); remove it and resume: its round is generated again"
    )


def rounds_in(journal: Path) -> dict[int, set[int]]:
    """Return, by step in order, the ranks whose part of that step's round is there."""
    ranks: dict[int, set[int]] = {}
    for _, step, rank in sorted(_round_files(journal), key=lambda file: file[1]):
        ranks.setdefault(step, set()).add(rank)
    return ranks


def drop_rounds(
    journal: Path,
    *,
    before: int = 0,
    after: int | None = None,
    of: Callable[[int], bool] = lambda rank: True,
) -> None:
    """Remove rounds from the journal, for good before anything else is written.

    Args:
        before: rounds of steps below it go.
        after: rounds of steps above it go; None keeps them.
        of: called with a rank; False keeps that rank's rounds.
    """
    dropped = [
        path
        for path, step, rank in _round_files(journal)
        if (step < before or (after is not None and step > after)) and of(rank)
    ]
    for path in dropped:
        path.unlink(missing_ok=True)
    if dropped:
        sync(journal)


def check_num_kept(limit: int | None) -> None:
    """Raise ConfigError where fewer checkpoints are to be kept than a damaged one needs beside it."""
    if limit is not None and limit < MIN_KEPT:
        raise ConfigError(
            f"save_total_limit must be {MIN_KEPT} or more, so that one checkpoint is whole where another is damaged; "
            f"it is {limit}"
        )


def check_replay(run: Path, journal: Path) -> None:
    """Raise RunFolderError unless the journal of `run` goes back to its first step."""
    rounds = rounds_in(journal)
    if not rounds:
        raise RunFolderError(
            f"--replay needs a run with a journal, and {run} has none; train it with --keep-journal"
        )
    if 0 not in rounds:
        raise RunFolderError(
            f"--replay begins at the first step, and the journal of {run} begins at step {min(rounds)}; older rounds "
            "go with their checkpoints, unless the run is trained with --keep-journal"
        )


def _round_files(journal: Path) -> list[tuple[Path, int, int]]:
    matches = (
        (path, _ROUND_NAME.fullmatch(path.name)) for path in journal.glob("round-*.json")
    )
    return [(path, int(match[1]), int(match[2])) for path, match in matches if match]


def parse_checkpoint(text: str, folder: RunFolder) -> int:
    """Return the step of `--resume-from`: a number, or a checkpoint's folder inside the run; else RunFolderError."""
    if text.isdigit():
        return int(text)
    path = Path(text).expanduser()
    if (
        path.resolve().parent != folder.checkpoints.resolve()
        or not path.name.removeprefix("checkpoint-").isdigit()
    ):
        raise RunFolderError(
            f"--resume-from takes a step or a folder of {folder.checkpoints}; it is {text!r}; {_listed(folder)}"
        )
    return step_of(path)


def check_checkpoint(folder: RunFolder, step: int) -> None:
    """Raise RunFolderError unless the run can go on from the checkpoint of this step; step 0 is the beginning."""
    checkpoint = checkpoint_of(folder.checkpoints, step)
    if step == 0:
        return
    if not checkpoint.is_dir():
        raise RunFolderError(
            f"{folder.root} has no checkpoint of step {step}; {_listed(folder)}"
        )
    if problem := checkpoint_problem(checkpoint):
        raise RunFolderError(f"{checkpoint} is damaged ({problem}); {_listed(folder)}")


def check_began_with(folder: RunFolder, contents: dict[str, str] | None) -> None:
    """RunFolderError where a run would go on with other contents than it began with, or nobody knows with which.

    `contents`: None where they are not known before the model is fetched.
    """
    if folder.identity.is_file():
        if contents is not None:
            check_contents(folder, contents)
    elif checkpoints_in(folder.checkpoints) or rounds_in(folder.journal):
        raise RunFolderError(
            f"{folder.identity} is missing, so nobody knows whether dataset, model and rewards are those that the run "
            "began with; put it back, or go on all the same with --resume --accept-changes"
        )


def outlook(folder: RunFolder, options: Resume) -> list[str]:
    """Say from which checkpoint `settle` would go on, and which damaged ones it would pass over; nothing is changed."""
    lines: list[str] = []
    step = options.step
    if step is None:
        step = newest_whole(folder.checkpoints, say=lines.append, moves=False)
    return [*lines, _beginning(step)]


def _beginning(step: int) -> str:
    if step:
        return f"going on from step {step}"
    return "going on from the first step: no checkpoint was saved yet"


def settle(
    folder: RunFolder, config: BaseModel, options: Resume, *, world: int, say: Say
) -> None:
    """Before anything is started, leave in the folder only what the run is to go on from, or raise RunFolderError.

    Checkpoints of later steps than `options` names are moved aside. Later rounds stay, and are trained on again as they
    were; where changed settings are accepted they are another run's, and are dropped.

    Args:
        options: the checkpoint to start from, and which changed settings are accepted.
        world: the number of ranks that go on, which may be another than before (`check_ranks`).
        say: takes a line for whatever is moved or dropped.
    """
    folder_claim = Claim(folder)
    try:
        check_claim(folder, config, resume=options)
        if options.step is not None:
            check_checkpoint(folder, options.step)
            for path in set_aside_after(folder.checkpoints, options.step):
                say(f"{path.name}: of a later step than {options.step}")
        step = newest_for(folder.checkpoints, world=world, say=say)
        folder.summary.unlink(missing_ok=True)  # a finished run that goes on is not finished
        say(_beginning(step))
        world_before = _world_before(folder, step)
        if world_before not in (None, world):
            say(
                f"{world} rank{'s' if world > 1 else ''} instead of {world_before}: the prompts come in the same "
                f"order, each once, and from here on the losses are those of {world}"
            )
        if options.accept_changes:
            if differences := changes(folder, config):
                say(f"accepted: {in_words(differences)}")
            drop_rounds(folder.journal, after=step - 1)
            folder.identity.unlink(missing_ok=True)
            write_description(folder, config, resume=True)
    finally:
        folder_claim.release()


def check_world(folder: RunFolder, options: Resume, *, world: int) -> None:
    """Check the ranks of the checkpoint that the run would go on from, by its manifest alone (`check_ranks`)."""
    for checkpoint in reversed(checkpoints_in(folder.checkpoints)):
        if options.step not in (None, step_of(checkpoint)):
            continue
        try:
            read_checkpoint_manifest(checkpoint)
        except RunFolderError:
            continue  # it is passed over when the run goes on
        check_ranks(checkpoint, world=world)
        return


def _world_before(folder: RunFolder, step: int) -> int | None:
    """Return the number of ranks that left the checkpoint, or else the first round; None where neither is there."""
    if step:
        return read_checkpoint_manifest(checkpoint_of(folder.checkpoints, step)).world
    with contextlib.suppress(RunFolderError, FileNotFoundError):
        _, content = read_round(round_file(folder.journal, 0, 0))
        return int(content["world"])
    return None


def _listed(folder: RunFolder) -> str:
    steps = [str(step_of(path)) for path in checkpoints_in(folder.checkpoints)]
    if not steps:
        return "no checkpoint was saved yet"
    return f"there are checkpoints of step {', '.join(steps)}"
