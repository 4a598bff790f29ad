"""Copies of the package to run from, and patches of them: seeded defects, points to die at, parts to time.

A `Patch` replaces a small piece of text in a file. Its text must be found exactly once: a defect that was never applied
cannot be caught, and a scorecard that counted it would be worthless.
"""

import compileall
import importlib.util
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ycore.errors import RunError

_PACKAGES = ("ycore", "ycore_cli", "ycore_recipes", "tests.chaos")

_FLUSHES = '''"""Made by tests.chaos: reports whether each published file had been flushed."""

from tests.chaos.witnesses import watch_flushes

watch_flushes()
'''


@dataclass(frozen=True, slots=True)
class Edit:
    """`old`, which is found once in `file`, becomes `new`; `file` is relative to the folder of the packages."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Patch:
    """A defect by name, and the edits that make it."""

    name: str
    edits: tuple[Edit, ...]

    def apply(self, root: Path) -> None:
        """RunError where an edit's text is not found, or found twice."""
        for edit in self.edits:
            path = root / edit.file
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
            count = text.count(edit.old)
            if count != 1:
                raise RunError(
                    f"the patch {self.name!r} does not apply: its text is {count} times in {edit.file}"
                )
            path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")


def copy_package(folder: Path, patches: Sequence[Patch] = ()) -> Path:
    """Copy the packages into `folder`, patched; with it in PYTHONPATH, a process imports these."""
    for name in _PACKAGES:
        place = folder.joinpath(*name.split("."))
        shutil.copytree(
            _source(name), place, ignore=shutil.ignore_patterns("__pycache__", "test_*")
        )
    (folder / "sitecustomize.py").write_text(_FLUSHES, encoding="utf-8")
    for patch in patches:
        patch.apply(folder)
    compileall.compile_dir(
        folder, quiet=1
    )  # once, and not in every process, where PYTHONDONTWRITEBYTECODE is set
    return folder


def _source(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise RunError(f"the package {name} is not found; run this from the repository root")
    return Path(spec.origin).parent


_RESTORE = "ycore/trl/base.py"
_FOLDER = "ycore/run/resuming.py"
_LOOP = "ycore/round/step.py"
_SAMPLING = "ycore/round/sampling.py"
_ENGINE = "ycore/engine/vllm_engine.py"

_LOADED = "        super()._load_optimizer_and_scheduler(checkpoint)\n"
_LOAD = (
    f"    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:\n{_LOADED}"
)
_REQUEST = """            answer = await self.request("POST", "/v1/completions", request)
        finally:
            self._request_ids.discard(request_id)
"""
_NOTHING = {
    "token_ids": [6],
    "logprobs": {"token_logprobs": [0.0]},
    "text": "0",
    "finish_reason": "stop",
}

IN_PLACE = Patch(
    "checkpoint written in place",
    (
        Edit(
            "ycore/run/resuming.py",
            "                if leads:\n                    self._stage(staged, step)\n",
            "                if leads:\n                    self._stage(staged, step)\n"
            "                    place = checkpoint_of(self._folder, step)\n"
            "                    place.mkdir(exist_ok=True)\n"
            "                    (staged / place.name).symlink_to(place.resolve())\n",
        ),
        Edit(
            _FOLDER,
            "    if place.is_dir():\n        _drop(place)\n    os.rename(staged, place)\n",
            "    staged.unlink()\n",
        ),
    ),
)

MUTATIONS: tuple[Patch, ...] = (
    Patch(
        # Either alone keeps a resumed run exact: both must be gone.
        "random generators neither restored nor seeded anew",
        (
            Edit(
                _RESTORE,
                _LOAD,
                f"    def _load_rng_state(self, checkpoint: Any) -> None:\n        pass\n\n{_LOAD}",
            ),
            Edit(
                "ycore/trl/seam.py",
                "        step = self.state.global_step\n        rank = self.accelerator.process_index\n",
                "        return\n        step = rank = 0\n",
            ),
        ),
    ),
    Patch(
        "optimizer not restored",
        (Edit(_RESTORE, _LOADED, f"{_LOADED}        self.optimizer.state.clear()\n"),),
    ),
    Patch(
        "scheduler not restored",
        (
            Edit(
                _RESTORE,
                _LOADED,
                f'{_LOADED}        vars(self.lr_scheduler).get("scheduler", self.lr_scheduler).last_epoch = 0\n',
            ),
        ),
    ),
    Patch(
        "no flush",
        (Edit("ycore/run/files.py", "                os.fsync(file.fileno())\n", ""),),
    ),
    IN_PLACE,
    Patch(
        "checkpoint not verified",
        (
            Edit(
                _FOLDER,
                "        return _first_damage(checkpoint, manifest.files)\n",
                "        return None\n",
            ),
        ),
    ),
    Patch(
        "damaged round accepted",
        (
            Edit(
                "ycore/run/files.py",
                'hashlib.sha256(body).hexdigest() != head.get("sha256")',
                "head is None",
            ),
        ),
    ),
    Patch(
        "a sync skipped",
        (
            Edit(
                _LOOP,
                "if self._synced != version and self._share_weights is not None:",
                "if self._synced != version and version != 3 and self._share_weights is not None:",
            ),
        ),
    ),
    Patch(
        "loaded weights not proved",
        (
            Edit(
                "ycore/engine/weight_proof.py",
                "    if differ:\n",
                "    if False and differ:\n",
            ),
        ),
    ),
    Patch(
        "an engine's error swallowed",
        (
            Edit(
                _ENGINE,
                _REQUEST,
                '            answer = await self.request("POST", "/v1/completions", request)\n'
                "        except Exception:\n"
                f'            answer = {{"choices": [{_NOTHING}]}}\n',
            ),
        ),
    ),
    Patch(
        "cursor off by one", (Edit(_SAMPLING, '= state["cursor"]', '= state["cursor"] + 1'),)
    ),
    Patch(
        "surplus not restored",
        (Edit(_SAMPLING, "= [from_json(Finished, item) for item in state]", "= []"),),
    ),
    Patch(
        "seeds by order, not by position",
        (
            Edit(
                "ycore/rollout/turns.py",
                '    key = f"{run_seed}/{position}/{index}" + (f"/{turn}" if turn else "")\n',
                '    _DRAWN.append(1)\n    key = f"{run_seed}/{len(_DRAWN)}"\n',
            ),
            Edit(
                "ycore/rollout/turns.py",
                "def completion_seed(",
                "_DRAWN: list[int] = []\n\n\ndef completion_seed(",
            ),
        ),
    ),
    Patch(
        "steps written twice",
        (
            Edit(
                "ycore/run/metrics.py",
                'if row.get("step", 0) <= step]',
                'if row.get("step", 0) <= step + 1]',
            ),
        ),
    ),
    Patch(
        "run not cleared away", (Edit("ycore/launch/guardian.py", "    watch.kill()\n", ""),)
    ),
)


@dataclass(frozen=True, slots=True)
class Point:
    """A line of a file, and whether to die before it or behind it."""

    name: str
    file: str
    line: str
    before: bool
    each_step: bool = True

    def hits(self, steps: int) -> int:
        """How often a run with a checkpoint every two steps comes here, at least."""
        return steps if self.each_step else steps // 2 - 2

    @property
    def patch(self) -> Patch:
        indent = self.line[: len(self.line) - len(self.line.lstrip())]
        call = f'{indent}__import__("tests.chaos.witnesses", fromlist=["reach"]).reach("{self.name}")\n'
        new = call + self.line if self.before else self.line + call
        return Patch(f"die at: {self.name}", (Edit(self.file, self.line, new),))


_SAVER = "ycore/trainer/training_run.py"
_WRITER = "ycore/run/resuming.py"
_COMMIT = "        self._journal.commit(step, groups, state, metrics, summaries)\n"

_AHEAD = "ycore/round/ahead.py"

STREAM_POINTS: tuple[Point, ...] = (
    Point(
        "engines halted, old weights",
        _AHEAD,
        "            await self.load_engines(folder, version)\n",
        before=True,
    ),
    Point(
        "engines loaded, halted",
        _AHEAD,
        "            await self.load_engines(folder, version)\n",
        before=False,
    ),
    Point("groups made, not committed", _LOOP, _COMMIT, before=True),
    Point(
        "round committed ahead",
        _AHEAD,
        "        self._states[step] = states_of(self)\n",
        before=True,
    ),
    Point(
        "round taken, not handed over",
        _AHEAD,
        "        groups = self.hand_over(committed)\n",
        before=True,
    ),
)

POINTS: tuple[Point, ...] = (
    Point(
        "weights written, not loaded",
        _LOOP,
        "            self.load(folder, version)\n",
        before=True,
    ),
    Point("engines have the weights", _LOOP, "        self._synced = version\n", before=False),
    Point("round made, not committed", _LOOP, _COMMIT, before=True),
    Point("round committed, not trained on", _LOOP, _COMMIT, before=False),
    Point(
        "file flushed, not renamed",
        "ycore/run/files.py",
        "                file.flush()\n                os.fsync(file.fileno())\n",
        before=False,
    ),
    Point(
        "step taken, not reported",
        _SAVER,
        "        self.checkpoints.remember()\n",
        before=True,
    ),
    Point(
        "row of metrics written",
        "ycore/run/metrics.py",
        "        self._file.write(_line(row))\n",
        before=False,
    ),
    Point(
        "checkpoint written, no manifest",
        _FOLDER,
        "    names = [str(path.relative_to(staged)) for path in files]\n",
        before=True,
        each_step=False,
    ),
    Point(
        "manifest written, no name",
        _FOLDER,
        "    sync_tree(staged)\n",
        before=True,
        each_step=False,
    ),
    Point(
        "name given, not flushed",
        _FOLDER,
        "    os.rename(staged, place)\n",
        before=False,
        each_step=False,
    ),
    Point(
        "checkpoint published, older ones there",
        _WRITER,
        "                    publish(self._folder, step, world=ranks.num_processes)\n",
        before=False,
        each_step=False,
    ),
    Point(
        "old checkpoint renamed",
        _FOLDER,
        "    os.rename(checkpoint, dying)\n",
        before=False,
        each_step=False,
    ),
    Point(
        "rounds dropped",
        _WRITER,
        "            self._prune(step_of(checkpoints_in(self._folder)[0]))\n",
        before=False,
        each_step=False,
    ),
)


_IMPORT = "\nfrom tests.chaos.witnesses import timed\n"


def _timed(part: str, file: str, anchor: str, function: str, *, indent: str = "") -> Patch:
    """Decorate `function`; `anchor` is an import of the file, behind which the stopwatch is imported."""
    return Patch(
        f"time {part}",
        (
            Edit(file, f"\n{anchor}\n", f"\n{anchor}{_IMPORT}"),
            Edit(
                file,
                f"\n{indent}def {function}(",
                f'\n{indent}@timed("{part}")\n{indent}def {function}(',
            ),
        ),
    )


PATIENT = Patch(
    "patient",
    (
        Edit(
            "ycore/rewards/worker_client.py",
            "_CHECK_DEADLINE_S = 60.0",
            "_CHECK_DEADLINE_S = 300.0",
        ),
    ),
)
"""The check of a reward before a run may take long on a machine that others load; no row is about that limit."""

PARTS: tuple[Patch, ...] = (
    _timed(
        "journal",
        "ycore/round/journal.py",
        "from ycore.run.files import make_folder",
        "commit",
        indent="    ",
    ),
    _timed(
        "sums of the weights",
        "ycore/engine/weight_proof.py",
        "from ycore.errors import SyncError",
        "tensor_sums",
    ),
    _timed(
        "read back", "ycore/engine/vllm_extension.py", "from typing import Any", "held_pieces"
    ),
    _timed(
        "flush and manifest",
        "ycore/run/resuming.py",
        "from ycore.errors import ConfigError, RunError, RunFolderError, YcoreError",
        "publish",
    ),
)
