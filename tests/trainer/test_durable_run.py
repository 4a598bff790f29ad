"""A run promises the same numbers after a resume at any step, and in a replay; nothing broken is saved.

The runs are whole `RolloutRun`s of a tiny model in this process, over transformers' generation, which draws from the
same generators as training does. A run that dies is one whose step raises; `test_exact_resume` kills real ones.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from tests.tiny_model import write_tiny_model
from ycore.config.schema import RunConfig
from ycore.data import source
from ycore.errors import DataError, RunError, RunFolderError, TrainerError
from ycore.round.assemble import assemble
from ycore.run.files import RunFolder, write_json_atomic
from ycore.run.metrics import read_metrics
from ycore.run.resuming import (
    checkpoint_of,
    checkpoint_problem,
    checkpoints_in,
    rounds_in,
    staging,
)
from ycore.trainer.rollout_run import RolloutRun

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 6
SAME = (
    "loss",
    "grad_norm",
    "reward",
    "entropy",
    "completions/mean_length",
    "learning_rate",
    "epoch",
    "num_tokens",
)
REWARD = """
def variety(prompts, completions, **columns):
    texts = [completion[0]["content"] for completion in completions]
    return [(len(set(text)) / 8 + 0.01 * len(text)) for text in texts]
"""

VARIANTS: dict[str, dict[str, Any]] = {
    "one step a round": {},
    "accumulation": {"per_device_train_batch_size": 4},
    "several steps a round": {"per_device_train_batch_size": 4, "steps_per_generation": 6},
    "several, twice": {
        "num_iterations": 2,
        "per_device_train_batch_size": 4,
        "steps_per_generation": 4,
    },
    "shuffled by TRL": {"loss_type": "bnpo", "per_device_train_batch_size": 4},
}


class Died(Exception):
    pass


class DiesAfter(TrainerCallback):
    """Stands in for a kill: nothing of ycore's catches it, and what follows the step does not happen."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            raise Died


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def make(place: Path, model: Path, trl: dict[str, Any], **settings: Any) -> RunFolder:
    """Write what the launcher leaves for the trainer."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "rewards.py").write_text(REWARD)
    (place / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n} + 1 ="}) + "\n" for n in range(11))
    )
    folder = RunFolder(place / "run")
    for path in (folder.root, folder.logs, folder.checkpoints):
        path.mkdir(exist_ok=True)
    values = {
        "model": str(model),
        "dataset": str(place / "rows.jsonl"),
        "rewards": [{"reward": f"{place / 'rewards.py'}:variety"}],
        "output": str(folder.root),
        "prompts_per_step": 2,
        "group_size": 4,
        "max_tokens": 8,
        "steps": STEPS,
        "checkpoint_every": 1,
        "dtype": "float32",
        "lora": {
            "r": 4,
            "dropout": 0.2,
        },  # dropout draws in training: without the generators the curves differ from the first step on
        "engine": {"kind": "transformers"},
        "reward_workers": {"workers": 1},
        "trl": {"learning_rate": 1e-2, **trl},
        **settings,
    }
    config = RunConfig.model_validate(values)
    write_json_atomic(folder.config, {"config": config.model_dump(mode="json")})
    kind = "replay" if config.replay else "transformers"
    write_json_atomic(
        folder.root / "engines.json",
        {"kind": kind, "engines": [], "model": str(model), "max_model_len": 64},
    )
    return folder


def train(folder: RunFolder, *callbacks: TrainerCallback) -> RolloutRun:
    """Lead a trainer's life, as `python -m ycore.trainer` does."""
    run = RolloutRun(assemble(folder.root))
    for callback in callbacks:
        run.trainer.add_callback(callback)
    try:
        run.train()
        run.save()
    finally:
        run.close()
    return run


def die(folder: RunFolder, *, after: int) -> None:
    with pytest.raises(Died):
        train(folder, DiesAfter(after))


def numbers(folder: RunFolder) -> list[dict[str, Any]]:
    return [
        {key: row.get(key) for key in ("step", *SAME)} for row in read_metrics(folder.metrics)
    ]


def weights(folder: RunFolder) -> dict[str, torch.Tensor]:
    return load_file(folder.model / "adapter_model.safetensors")


def assert_same(run: RunFolder, other_run: RunFolder) -> None:
    assert numbers(run) == numbers(other_run)
    first, second = weights(run), weights(other_run)
    assert first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


@pytest.fixture(scope="module")
def reference(
    tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Callable[[str], RunFolder]:
    """Make the uninterrupted run of a variant, once."""
    made: dict[str, RunFolder] = {}

    def of(variant: str) -> RunFolder:
        if variant not in made:
            folder = make(
                tmp_path_factory.mktemp("whole"), model, VARIANTS[variant], keep_journal=True
            )
            train(folder)
            seen = numbers(folder)
            assert [row["step"] for row in seen] == list(range(1, STEPS + 1))
            assert len({row["loss"] for row in seen}) == STEPS and all(
                row["grad_norm"] > 0 for row in seen
            )
            made[variant] = folder
        return made[variant]

    return of


# -- resume ------------------------------------------------------------------------------------------------------------


# Accumulation alone is resumed in the test of a damaged checkpoint.
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=[pytest.mark.verify] * (name != "several steps a round"))
        for name in VARIANTS
        if name != "accumulation"
    ],
)
def test_a_resume_is_exact_wherever_it_falls(
    variant: str, tmp_path: Path, model: Path, reference: Callable[[str], RunFolder]
) -> None:
    """It dies twice, after an odd and an even step, so that one of them falls inside a round of several steps."""
    folder = make(tmp_path, model, VARIANTS[variant])
    die(folder, after=2)  # its checkpoint was not written yet: the run goes on from the first
    assert [path.name for path in checkpoints_in(folder.checkpoints)] == ["checkpoint-1"]
    die(folder, after=5)
    train(folder)
    assert_same(folder, reference(variant))


class Edits(TrainerCallback):
    """Somebody changes a file after step 2."""

    def __init__(self, path: Path, text: str) -> None:
        self._path, self._text = path, text

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self._path.write_text(self._text)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="emptied", marks=pytest.mark.verify),
        pytest.param('{"prompt": "2 + 2 ="}\n' * 11, id="rewritten"),
    ],
)
def test_a_run_goes_on_with_its_own_rows_when_the_dataset_is_edited(
    tmp_path: Path, model: Path, reference: Callable[[str], RunFolder], text: str
) -> None:
    folder = make(tmp_path, model, {})
    train(folder, Edits(tmp_path / "rows.jsonl", text))
    assert (tmp_path / "rows.jsonl").read_text() == text
    assert_same(folder, reference("one step a round"))


def test_a_dataset_too_large_for_memory_that_is_edited_ends_the_run_which_resumes_once_it_is_back(
    tmp_path: Path,
    model: Path,
    reference: Callable[[str], RunFolder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source, "_IN_MEMORY_BYTES", 0)
    folder = make(tmp_path, model, {})
    path = tmp_path / "rows.jsonl"
    rows = path.read_text()
    with pytest.raises(
        DataError, match=r"rows.jsonl, line \d+: the file was changed while it was in use"
    ):
        train(folder, Edits(path, rows.replace("+", "-")))
    path.write_text(rows)
    train(folder)
    assert_same(folder, reference("one step a round"))


@pytest.mark.verify
def test_the_curve_depends_on_the_generators(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: neither seeded for every step nor restored from the checkpoint, they make another curve."""
    seam = "ycore.trl.seam.SeamGRPOTrainer"
    monkeypatch.setattr(f"{seam}._seed_generators", lambda self, use: None)
    monkeypatch.setattr(f"{seam}._load_rng_state", lambda self, checkpoint: None)
    folder = make(tmp_path, model, {})
    die(folder, after=4)
    train(folder)
    whole = make(tmp_path / "whole", model, {})
    train(whole)
    assert numbers(folder) != numbers(whole)


def test_a_damaged_checkpoint_is_passed_over_and_the_run_still_exact(
    tmp_path: Path,
    model: Path,
    reference: Callable[[str], RunFolder],
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = make(tmp_path, model, VARIANTS["accumulation"])
    die(folder, after=5)
    optimizer = checkpoint_of(folder.checkpoints, 4) / "optimizer.pt"
    optimizer.write_bytes(optimizer.read_bytes()[:-1])
    (staging(folder.checkpoints, 5) / "checkpoint-5").mkdir(
        parents=True
    )  # as a save that was killed leaves it
    train(folder)
    assert "checkpoint-4 is damaged (optimizer.pt has " in capfd.readouterr().out
    assert (folder.checkpoints / "damaged-checkpoint-4").is_dir()
    assert not staging(folder.checkpoints, 5).exists()
    assert_same(folder, reference("accumulation"))


def test_a_checkpoint_holds_all_state_that_matters(
    reference: Callable[[str], RunFolder],
) -> None:
    """The inventory: leave one of these out, and a resumed run is another run."""
    folder = reference("several steps a round")
    saved = checkpoint_of(folder.checkpoints, 5)
    assert checkpoint_problem(saved) is None
    names = {path.name for path in saved.iterdir()}
    assert names >= {
        "adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json",
        "controller-0.json", "round-0.safetensors", "manifest.json",
    }  # fmt: skip
    optimizer = torch.load(saved / "optimizer.pt", weights_only=True)
    assert {"exp_avg", "exp_avg_sq", "step"} <= optimizer["state"][0].keys()
    assert torch.load(saved / "scheduler.pt", weights_only=True)["last_epoch"] == 5
    assert json.loads((saved / "trainer_state.json").read_text())["global_step"] == 5
    state = json.loads((saved / "controller-0.json").read_text())
    assert state["policy_version"] == 5
    assert state["trainer"]["micro_step"] == 10
    assert {"draws", "acceptance", "leftover_groups"} <= state["controller"].keys()
    assert state["controller"]["draws"]["cursor"] >= 4
    assert state["controller"]["acceptance"]["finished"] > 1
    in_use = load_file(saved / "round-0.safetensors")
    assert {"0/advantages", "5/old_per_token_logps", "5/completion_ids"} <= in_use.keys()


def test_what_the_run_learns_from_may_not_change_unnoticed(tmp_path: Path, model: Path) -> None:
    folder = make(tmp_path, model, {})
    die(folder, after=1)
    files = {"dataset": tmp_path / "rows.jsonl", "reward": tmp_path / "rewards.py"}
    for name, file in files.items():
        before = file.read_text()
        file.write_text(before.replace("1", "2"))
        with pytest.raises(
            RunFolderError, match=rf"\({name}.*sha256 \w+' there, .* here\).*--accept-changes"
        ):
            RolloutRun(assemble(folder.root))
        file.write_text(before)
    folder.identity.unlink()  # what --accept-changes does
    RolloutRun(assemble(folder.root)).close()
    assert folder.identity.is_file()


# -- journal -----------------------------------------------------------------------------------------------------------


def test_the_journal_is_pruned_with_the_checkpoints_or_kept(
    tmp_path: Path, model: Path, reference: Callable[[str], RunFolder]
) -> None:
    folder = make(tmp_path, model, {})
    train(folder)
    assert [path.name for path in checkpoints_in(folder.checkpoints)] == [
        "checkpoint-5",
        "checkpoint-6",
    ]
    assert list(rounds_in(folder.journal)) == [5]
    assert list(rounds_in(reference("one step a round").journal)) == list(range(STEPS))


def test_a_replay_with_the_same_settings_is_the_same_run(
    tmp_path: Path, model: Path, reference: Callable[[str], RunFolder]
) -> None:
    variant = "several, twice"
    whole = reference(variant)
    folder = make(tmp_path, model, VARIANTS[variant], replay=str(whole.root))
    die(folder, after=3)
    train(folder)
    assert_same(folder, whole)
    assert all(row["ycore/replayed"] == 1.0 for row in read_metrics(folder.metrics)[:1])
    assert not folder.samples.exists() and not folder.journal.exists()


def test_a_replay_with_other_settings_learns_otherwise_from_the_same_rollouts(
    tmp_path: Path, model: Path, reference: Callable[[str], RunFolder]
) -> None:
    whole = reference("one step a round")
    folder = make(
        tmp_path, model, {"learning_rate": 1e-3, "loss_type": "dr_grpo"}, replay=str(whole.root)
    )
    train(folder)
    mine, theirs = read_metrics(folder.metrics), read_metrics(whole.metrics)
    assert [row["reward"] for row in mine] == [row["reward"] for row in theirs]
    assert mine[-1]["loss"] != theirs[-1]["loss"]
    assert not torch.equal(*(next(iter(weights(run).values())) for run in (folder, whole)))


# -- nothing but numbers -----------------------------------------------------------------------------------------------


class Poison(TrainerCallback):
    """Puts a value into a weight inside the fourth step, between its micro-batches, or at its end."""

    def __init__(self, value: float, *, at_the_end: bool) -> None:
        self._value, self._at_the_end = value, at_the_end

    def on_substep_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        if state.global_step == 3 and not self._at_the_end:
            self._put_into(model)

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        if state.global_step == 3 and self._at_the_end:
            self._put_into(model)

    def _put_into(self, model: torch.nn.Module) -> None:
        next(weight for weight in model.parameters() if weight.requires_grad).data[0, 0] = (
            self._value
        )


@pytest.mark.parametrize(
    ("poison", "said"),
    [
        (Poison(math.nan, at_the_end=False), r"step 4: the loss is nan"),
        (
            Poison(math.inf, at_the_end=True),
            r"after step 4 the weight .*lora_A.* is not finite",
        ),
    ],
    ids=["loss", "weight"],
)
def test_a_number_that_is_none_stops_the_run_before_it_is_saved(
    tmp_path: Path, model: Path, poison: TrainerCallback, said: str
) -> None:
    folder = make(tmp_path, model, VARIANTS["accumulation"])
    with pytest.raises(
        TrainerError, match=said + ".*the last checkpoint stands.*--accept-changes"
    ):
        train(folder, poison)
    saved = checkpoints_in(folder.checkpoints)
    assert [path.name for path in saved] == ["checkpoint-2", "checkpoint-3"]
    assert all(checkpoint_problem(path) is None for path in saved)
    for path in saved:
        assert all(
            tensor.isfinite().all()
            for tensor in load_file(path / "adapter_model.safetensors").values()
        )
    assert not folder.model.exists()
    assert TrainerError.exit_code == 1 and issubclass(TrainerError, RunError)
