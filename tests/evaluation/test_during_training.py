"""Whole runs that are evaluated on the way: training is the same to the bit, the best model is kept, a run ends early.

They are `RolloutRun`s of a tiny model in this process, as in `test_durable_run`.
"""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from tests.tiny_model import write_tiny_model
from tests.trainer.test_durable_run import STEPS, die, make, numbers, train
from ycore.config.schema import RewardConfig, RunConfig
from ycore.evaluation import during_training
from ycore.evaluation.during_training import Evaluation, RolloutEvaluation
from ycore.round.assemble import assemble
from ycore.run.files import RunFolder
from ycore.run.metrics import read_metrics
from ycore.trainer.rollout_run import RolloutRun
from ycore.trainer.training_run import TrainingRun
from ycore.trl.seam import SeamGRPOTrainer

pytestmark = pytest.mark.filterwarnings("ignore")

SAME = "def same(completions, **columns):\n    return [0.1 for _ in completions]\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def evaluated(
    place: Path, model: Path, trl: dict[str, Any] | None = None, **settings: Any
) -> RunFolder:
    place.mkdir(parents=True, exist_ok=True)
    (place / "held.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n} + 2 ="}) + "\n" for n in range(5))
    )
    return make(
        place,
        model,
        trl or {},
        eval_dataset=str(place / "held.jsonl"),
        eval_every=2,
        num_samples=2,
        **settings,
    )


def held_out(folder: RunFolder) -> dict[int, float]:
    return {
        row["step"]: row["ycore/eval/reward"]
        for row in read_metrics(folder.metrics)
        if "ycore/eval/reward" in row
    }


class Keeps(TrainerCallback):
    """The adapter after every step."""

    def __init__(self, model_of: Any) -> None:
        self.model_of, self.steps = model_of, dict[int, dict[str, torch.Tensor]]()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        weights = self.model_of().named_parameters()
        self.steps[state.global_step] = {
            name: parameter.detach().clone()
            for name, parameter in weights
            if parameter.requires_grad
        }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[RunFolder, RunFolder]:
    """Train the same run without evaluations, and with them."""
    place = tmp_path_factory.mktemp("whole")
    plain, folder = (
        make(place / "plain", model, {}),
        evaluated(place / "evaluated", model, keep_best="reward"),
    )
    train(plain)
    train(folder)
    return plain, folder


def test_evaluations_change_nothing_of_the_training(whole: tuple[RunFolder, RunFolder]) -> None:
    plain, folder = whole
    assert numbers(plain) == [row for row in numbers(folder) if row["loss"] is not None]
    plain_adapter, evaluated_adapter = (
        load_file(run.model / "adapter_model.safetensors") for run in whole
    )
    assert all(
        torch.equal(plain_adapter[name], evaluated_adapter[name]) for name in plain_adapter
    )
    assert list(held_out(folder)) == [0, 2, 4, STEPS]
    report = json.loads(folder.held_out.read_text())
    assert report["held_out"]["before"]["reward"] == held_out(folder)[0]
    assert report["held_out"]["after"]["reward"] == held_out(folder)[STEPS]


@pytest.mark.verify
def test_a_run_that_dies_measures_the_same_when_it_goes_on(
    tmp_path: Path, model: Path, whole: tuple[RunFolder, RunFolder]
) -> None:
    folder = evaluated(tmp_path, model, keep_best="reward")
    die(folder, after=3)
    die(folder, after=4)
    train(folder)
    assert held_out(folder) == held_out(whole[1])
    plain, rows = (
        make(tmp_path / "bare", model, {}),
        [row for row in numbers(folder) if row["loss"] is not None],
    )
    assert rows == numbers(whole[0]) and plain.root.is_dir()
    best = json.loads((folder.best / "evaluation.json").read_text())
    assert best["step"] == max(
        held_out(folder), key=lambda step: (held_out(folder)[step], -step)
    )
    assert best["step"] == json.loads(folder.held_out.read_text())["best"]["step"]


def test_the_best_model_is_kept_beside_the_last(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measured values are the test's own: the second evaluation is the best."""
    rewards = {0: 0.1, 2: 0.9, 4: 0.3, 6: 0.2}
    monkeypatch.setattr(
        "ycore.evaluation.during_training.evaluate_policy",
        lambda *_, step, config: {"reward": rewards[step]},
    )
    folder = evaluated(tmp_path, model, keep_best="reward")
    run = RolloutRun(assemble(folder.root))
    keeps = Keeps(lambda: run.trainer.bare_model)
    run.trainer.add_callback(keeps)
    try:
        run.train()
        run.save()
    finally:
        run.close()
    saved = load_file(folder.best / "adapter_model.safetensors")
    after_two = list(keeps.steps[2].values())
    assert len(saved) == len(after_two)
    assert all(
        any(torch.equal(weight, parameter) for parameter in after_two)
        for weight in saved.values()
    )
    last = load_file(folder.model / "adapter_model.safetensors")
    assert not all(torch.equal(saved[name], last[name]) for name in saved)


class Scripted(Evaluation):
    """An evaluation whose figures are given by step."""

    def __init__(self, run: Any, config: Any, rewards: dict[int, float]) -> None:
        super().__init__(run, config, measures=True)
        self.rewards = rewards

    def _figures(self, step: int) -> dict[str, float]:
        return {"ycore/eval/reward": self.rewards[step]}


@pytest.mark.parametrize("resumed", [2, 4])
def test_after_a_best_that_is_taken_again_the_next_best_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: int
) -> None:
    """The best model, of step 4, goes with its step; that of step 2 was replaced by it, and is not there again."""
    monkeypatch.setattr(during_training, "Trainer", Mock())
    folder = evaluated(tmp_path, tmp_path, keep_best="reward")
    rewards = {0: 0.1, 2: 0.5, 4: 0.9}
    rows = [{"step": step, "ycore/eval/reward": value} for step, value in rewards.items()]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder.best.mkdir()
    (folder.best / "evaluation.json").write_text(json.dumps(rows[-1]))
    trainer = Mock()
    trainer.args.max_steps = 8
    run = SimpleNamespace(
        home=folder,
        trainer=trainer,
        leads=True,
        ended_early=None,
        last_step_s=1.0,
        mark_progress=Mock(),
        sum_over_ranks=float,
        save_model_in=lambda place: place.mkdir(),
    )
    config = RunConfig.model_validate(json.loads(folder.config.read_text())["config"])
    evaluation = Scripted(run, config, {4: 0.3, 6: 0.4, 8: 0.2})
    control = SimpleNamespace(should_training_stop=False)
    state = trainer.state
    state.global_step = resumed
    evaluation.on_train_begin(trainer.args, state, control)  # type: ignore[arg-type]
    for step in range(resumed + 2, 9, 2):
        state.global_step = step
        evaluation.on_step_end(trainer.args, state, control)  # type: ignore[arg-type]
    evaluation.finish()
    best = json.loads(folder.held_out.read_text())["best"]
    expected = {"step": 6, "reward": 0.4} if resumed == 2 else {"step": 4, "reward": 0.9}
    assert best == expected
    assert json.loads((folder.best / "evaluation.json").read_text())["step"] == best["step"]


def test_a_run_without_gain_ends_early_and_is_finished(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ycore.evaluation.during_training.evaluate_policy",
        lambda *_, step, config: {"reward": 0.5},
    )
    folder = evaluated(tmp_path, model, stop_when=["no-gain:2"])
    train(folder)
    assert [row["step"] for row in read_metrics(folder.metrics)] == [0, 1, 2, 3, 4]
    assert "no gain in 2 evaluations" in json.loads(folder.held_out.read_text())["ended_early"]
    assert (folder.model / "adapter_model.safetensors").is_file()


def constant(place: Path, model: Path, **settings: Any) -> RunFolder:
    place.mkdir(parents=True, exist_ok=True)
    (place / "same.py").write_text(SAME)
    return make(
        place, model, {}, rewards=[{"reward": f"{place / 'same.py'}:same"}], steps=3, **settings
    )


def test_steps_without_a_group_that_can_teach_take_no_forward_and_end_a_run(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards: list[int] = []
    score = SeamGRPOTrainer._get_per_token_logps_and_entropies

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        forwards.append(1)
        return score(self, *args, **kwargs)

    monkeypatch.setattr(SeamGRPOTrainer, "_get_per_token_logps_and_entropies", counted)
    skipping = constant(tmp_path / "skipping", model)
    train(skipping)
    rows = read_metrics(skipping.metrics)
    assert [row["ycore/skipped"] for row in rows] == [1.0] * 3 and not forwards
    assert all(row["loss"] == 0 and row["grad_norm"] == 0 for row in rows)

    monkeypatch.setattr(SeamGRPOTrainer, "_may_skip", False)
    computed = constant(tmp_path / "computed", model)
    train(computed)
    assert forwards and all(
        abs(row["grad_norm"]) < 1e-4 for row in read_metrics(computed.metrics)
    )

    monkeypatch.setattr(SeamGRPOTrainer, "_may_skip", True)
    ending = constant(tmp_path / "ending", model, stop_when=["nothing-to-learn:2"])
    train(ending)
    assert [row["step"] for row in read_metrics(ending.metrics)] == [1, 2]
    short = constant(tmp_path / "short", model, stop_when=["seconds:1"])
    monkeypatch.setattr(
        TrainingRun, "last_step_s", property(lambda _: 0.7, lambda *_: None), raising=False
    )
    train(short)
    assert [row["step"] for row in read_metrics(short.metrics)] == [1]


def test_a_round_with_one_group_that_can_teach_is_trained_on(
    whole: tuple[RunFolder, RunFolder],
) -> None:
    assert all(
        row["ycore/skipped"] == 0 and row["grad_norm"] > 0
        for row in read_metrics(whole[0].metrics)
    )


def test_no_round_is_under_way_while_a_run_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds ahead are written first, and the weights of the step go to the engines after them."""
    calls = Mock()
    calls.evaluate.return_value = {"reward": 0.5}
    monkeypatch.setattr(during_training, "evaluate_policy", calls.evaluate)
    trainer = SimpleNamespace(room_for_engines=nullcontext)
    held_out: Any = SimpleNamespace(draws=SimpleNamespace(prompts=["1 + 1 ="]))
    run: Any = SimpleNamespace(home=RunFolder(tmp_path), trainer=trainer)
    config = RunConfig(
        model="m",
        dataset="d",
        rewards=[RewardConfig(reward="length")],
        output=str(tmp_path),
        eval_dataset="d",
    )
    evaluation = RolloutEvaluation(run, config, calls.controller, held_out)
    figures = evaluation._figures(4)
    assert figures["ycore/eval/reward"] == 0.5
    order = [name for name, _, _ in calls.mock_calls if "__" not in name]
    assert order == ["controller.rest", "controller.sync", "evaluate"]
