"""From where a run goes on: settled in its folder before anything is started."""

import tempfile
from pathlib import Path
from typing import Any

import pytest

from ycore.config.schema import RewardConfig, RunConfig
from ycore.errors import RunFolderError
from ycore.run.claim import Resume, claim, settings_that_differ
from ycore.run.files import RunFolder, read_json, write_json_atomic
from ycore.run.resuming import (
    check_world,
    checkpoint_of,
    checkpoints_in,
    parse_checkpoint,
    publish,
    read_round,
    round_file,
    rounds_in,
    settle,
    staging,
    step_of,
)


def config_for(folder: RunFolder, **changes: Any) -> RunConfig:
    values = {
        "model": "m",
        "dataset": "d",
        "rewards": [RewardConfig(reward="exact_answer")],
        **changes,
    }
    return RunConfig(output=str(folder.root), **values)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Make a run that was stopped after step 7: checkpoints of 2, 4 and 6, rounds from step 2 on."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = RunFolder(tmp_path / "run")
    claim(folder, config_for(folder), resume=False).release()
    for step in (2, 4, 6):
        staged = staging(folder.checkpoints, step) / f"checkpoint-{step}"
        staged.mkdir(parents=True)
        for name in ("model.safetensors", "trainer_state.json", "rng_state.pth"):
            (staged / name).write_bytes(b"w" * step)
        publish(folder.checkpoints, step, world=1)
    folder.journal.mkdir()
    for step in range(2, 8):
        round_file(folder.journal, step, 0).write_text("")
    folder.identity.write_text("{}")
    return folder


def settled(
    folder: RunFolder, resume: Resume, *, world: int = 1, **changes: Any
) -> tuple[list[str], list[int], list[int]]:
    """Settle, and return what was said and the steps of the checkpoints and rounds that are left."""
    said: list[str] = []
    settle(folder, config_for(folder, **changes), resume, world=world, say=said.append)
    return (
        said,
        [step_of(path) for path in checkpoints_in(folder.checkpoints)],
        list(rounds_in(folder.journal)),
    )


def test_by_itself_it_goes_on_from_the_newest_and_takes_begun_rounds_again(
    folder: RunFolder,
) -> None:
    assert settled(folder, Resume()) == (
        ["going on from step 6"],
        [2, 4, 6],
        [2, 3, 4, 5, 6, 7],
    )
    assert folder.identity.is_file()


def test_a_damaged_newest_is_named(folder: RunFolder) -> None:
    (checkpoint_of(folder.checkpoints, 6) / "model.safetensors").write_bytes(b"xxxxxx")
    said, steps, _ = settled(folder, Resume())
    assert (
        said[0].startswith("checkpoint-6 is damaged (model.safetensors has changed")
        and said[1] == "going on from step 4"
    )
    assert steps == [2, 4]


def test_a_checkpoint_can_be_chosen(folder: RunFolder) -> None:
    write_json_atomic(folder.summary, {"status": "finished"})
    said, steps, rounds = settled(folder, Resume(step=4))
    assert said == ["aside-checkpoint-6: of a later step than 4", "going on from step 4"]
    assert (steps, rounds) == ([2, 4], [2, 3, 4, 5, 6, 7])
    assert not folder.summary.exists()


def test_the_beginning_can_be_chosen(folder: RunFolder) -> None:
    said, steps, _ = settled(folder, Resume(step=0))
    assert (
        steps == [] and said[-1] == "going on from the first step: no checkpoint was saved yet"
    )


def test_accepted_changes_are_named_and_the_old_future_is_dropped(folder: RunFolder) -> None:
    with pytest.raises(RunFolderError, match=r"seed: 0 there, 3 here.*--accept-changes"):
        settled(folder, Resume(), seed=3)
    said, steps, rounds = settled(folder, Resume(accept_changes=True), seed=3)
    assert said == ["going on from step 6", "accepted: seed: 0 there, 3 here"]
    assert (steps, rounds) == ([2, 4, 6], [2, 3, 4, 5])
    assert not folder.identity.exists() and read_json(folder.config)["config"]["seed"] == 3
    claim(folder, config_for(folder, seed=3), resume=True).release()


def test_a_finished_run_goes_on_for_longer_with_accepted_changes(folder: RunFolder) -> None:
    write_json_atomic(folder.summary, {"status": "finished"})
    with pytest.raises(
        RunFolderError, match=r"finished; go on for longer with `ycore resume .*/run --steps N`"
    ):
        settled(folder, Resume())
    settled(folder, Resume(accept_changes=True), steps=101)
    claim(folder, config_for(folder, steps=101), resume=True).release()


@pytest.mark.parametrize(
    ("checkpoint", "step"), [("4", 4), ("0", 0), ("{checkpoints}/checkpoint-6", 6)]
)
def test_a_checkpoint_is_named_by_step_or_path(
    folder: RunFolder, checkpoint: str, step: int
) -> None:
    assert parse_checkpoint(checkpoint.format(checkpoints=folder.checkpoints), folder) == step


@pytest.mark.parametrize(
    "checkpoint", ["last", "elsewhere/checkpoint-6", "-1", "{checkpoints}/damaged-checkpoint-6"]
)
def test_other_names_are_refused(folder: RunFolder, checkpoint: str) -> None:
    with pytest.raises(
        RunFolderError,
        match=r"--resume-from takes a step or a folder.*checkpoints of step 2, 4, 6",
    ):
        parse_checkpoint(checkpoint.format(checkpoints=folder.checkpoints), folder)


def test_a_checkpoint_that_is_not_there_is_refused(folder: RunFolder) -> None:
    with pytest.raises(
        RunFolderError, match=r"no checkpoint of step 3; there are checkpoints of step 2, 4, 6"
    ):
        settled(folder, Resume(step=3))
    assert len(checkpoints_in(folder.checkpoints)) == 3


def test_a_round_in_the_journal_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """The very bytes, so that a run begun before a change of this code goes on after it."""
    path = round_file(tmp_path, 3, 0)
    path.write_bytes(
        b'{"schema": 1, "step": 3, "rank": 0, "world": 1, "seed": 7, '
        b'"sha256": "e766c7ee528a803d5ff81f12c547667e8c67a919680fd5a333ebd2d3709a33e5"}\n'
        b'{"groups": [], "state": {"cursor": 4}, "metrics": {"ycore/reward": 0.5}}\n'
    )
    head, content = read_round(path)
    assert path.name == "round-000003-rank-0.json" and (head["step"], head["seed"]) == (3, 7)
    assert content == {"groups": [], "state": {"cursor": 4}, "metrics": {"ycore/reward": 0.5}}


def save(folder: RunFolder, step: int, *names: str, world: int) -> None:
    staged = staging(folder.checkpoints, step) / f"checkpoint-{step}"
    staged.mkdir(parents=True)
    for name in (
        "model.safetensors",
        "trainer_state.json",
        *(f"rng_state_{rank}.pth" for rank in range(world)),
        *names,
    ):
        (staged / name).write_bytes(b"w")
    publish(folder.checkpoints, step, world=world)


def test_another_number_of_ranks_is_said(folder: RunFolder) -> None:
    save(folder, 8, "controller-0.json", "controller-1.json", "optimizer.pt", world=2)
    said, *_ = settled(folder, Resume(), world=1, processes=1)
    assert said[0] == "going on from step 8" and said[1].startswith(
        "1 rank instead of 2: the prompts come in the same"
    )
    assert settled(folder, Resume(), world=2)[0] == ["going on from step 8"]


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (("optimizer.pt",), "a run on given examples keeps its number of ranks"),
        (("controller-0.json",), "the optimizer's state is in shards, one a rank"),
        (
            ("controller-0.json", "optimizer.pt", "round-0.safetensors"),
            "later steps still learn from its round",
        ),
    ],
)
def test_what_cannot_go_on_with_other_ranks_is_refused(
    folder: RunFolder, names: tuple[str, ...], why: str
) -> None:
    save(folder, 8, *names, world=2)
    for refuse in (
        lambda: settled(folder, Resume(), world=3),
        lambda: check_world(folder, Resume(), world=3),
    ):
        with pytest.raises(
            RunFolderError,
            match=f"checkpoint-8 was saved by 2 ranks, and this run has 3; {why}",
        ) as error:
            refuse()
        assert "go on with --processes 2, or" in str(error.value)
    check_world(folder, Resume(), world=2)
    check_world(folder, Resume(step=6), world=1)


def test_how_a_rank_divides_its_part_is_free_with_the_number_of_ranks() -> None:
    stored = {"processes": 2, "trl": {"per_device_train_batch_size": 4, "learning_rate": 1e-5}}
    current = {"processes": 1, "trl": {"per_device_train_batch_size": 8, "learning_rate": 1e-5}}
    assert settings_that_differ(stored, current) == []
    assert [
        difference.name
        for difference in settings_that_differ({**stored, "processes": 1}, current)
    ] == ["trl.per_device_train_batch_size"]
