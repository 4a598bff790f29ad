"""A pipeline from end to end over commands of the test's own: they leave what real runs leave, and train nothing."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ycore.api.pipeline_run import (
    check_folder,
    check_pipeline,
    headline,
    run_pipeline,
    step_config,
    table_rows,
    with_stand_ins,
)
from ycore.api.stages import parse_pipeline, steps_of
from ycore.config.schema import AnyConfig, TuneConfig
from ycore.errors import ConfigError, DataError, EngineError, Interrupted, RunFolderError
from ycore.run.claim import claim
from ycore.run.files import write_json_atomic
from ycore.run.paths import RunFolder
from ycore.run.reports import TRACKER_GROUP

REWARDS = [{"reward": "exact_answer", "weight": 2.0}]
DECLARED: dict[str, Any] = {
    "model": "m",
    "stages": {
        "sft": {"dataset": "d", "steps": 3},
        "pairs": {"dataset": "d", "rewards": REWARDS, "num_samples": 2},
        "dpo": {"dataset": "${pairs.dataset}"},
    },
}


class Scripted:
    """Commands that only leave a run's folder behind; `stops` maps a stage to what it raises, once."""

    def __init__(self, **stops: BaseException) -> None:
        self.ran: list[tuple[str, bool]] = []
        self.checked: list[str] = []
        self.groups: list[str | None] = []
        self._stops = stops

    def check(self, config: AnyConfig, resume: bool) -> list[tuple[str, str]]:
        self.checked.append(f"{config.model} {config.dataset}")
        if config.dataset == "nowhere":
            raise DataError("no such dataset")
        return [("model", config.model)]

    def run(self, config: AnyConfig, resume: bool) -> dict[str, Any]:
        self.check(config, resume)
        folder = RunFolder(Path(config.output))
        self.ran.append((folder.root.name, resume))
        self.groups.append(os.environ.get(TRACKER_GROUP))
        claim(folder, config, resume=resume).release()
        stop = self._stops.pop(folder.root.name.replace("-", "_"), None)
        if stop is not None:
            write_json_atomic(folder.summary, {"status": "interrupted", "wall_s": 1.0})
            raise stop
        if config.algorithm == "eval":
            rows = [
                {"row": 0, "prompt": "p", "completion": str(n), "rewards": [float(n)]}
                for n in range(2)
            ]
            (folder.root / "completions.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in rows)
            )
        else:
            folder.model.mkdir()
        summary = {
            "status": "finished",
            "wall_s": 2.0,
            "reward_first": 0.25,
            "reward_last": 0.5,
        }
        write_json_atomic(folder.summary, summary)
        return summary


def run(
    root: Path, commands: Scripted, *, resume: bool = False, declared: dict[str, Any] = DECLARED
) -> dict[str, Any]:
    pipeline = parse_pipeline({**declared, "output": str(root)}, name="mine")
    return run_pipeline(
        pipeline,
        steps_of(pipeline),
        commands.run,
        declared=declared,
        resume=resume,
        say=lambda line: None,
    )


def test_each_stage_gets_what_the_last_one_made(tmp_path: Path) -> None:
    root, commands = tmp_path / "out", Scripted()
    report = run(root, commands)
    assert commands.ran == [("sft", False), ("pairs", False), ("dpo", False)]
    assert commands.checked == [
        "m d",
        f"{root}/sft/model d",
        f"{root}/sft/model {root}/pairs/pairs.jsonl",
    ]
    assert json.loads((root / "pairs" / "pairs.jsonl").read_text())["chosen_reward"] == 2.0, (
        "by the stage's weights"
    )
    assert report == json.loads((root / "pipeline.json").read_text())
    assert (report["status"], report["wall_s"]) == ("finished", 6.0)
    assert table_rows(report) == [
        ("sft", "sft: finished, 2 s, reward 0.250 -> 0.500"),
        ("pairs", "pairs: finished, 2 s, reward 0.250 -> 0.500"),
        ("dpo", "dpo: finished, 2 s, reward 0.250 -> 0.500"),
    ]


@pytest.mark.parametrize("given", [None, "family"])
def test_stages_are_one_group_of_trackers(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TRACKER_GROUP, raising=False)
    if given is not None:
        monkeypatch.setenv(TRACKER_GROUP, given)
    run(tmp_path / "out", commands := Scripted())
    assert commands.groups == [given or "out"] * 3 and os.environ.get(TRACKER_GROUP) == given


@pytest.mark.parametrize("stopped", ["sft", "dpo"])
@pytest.mark.parametrize("stop", [Interrupted("stopped after step 1"), KeyboardInterrupt()])
def test_an_interrupt_is_one_line_and_the_stage_goes_on_inside(
    stopped: str, stop: BaseException, tmp_path: Path
) -> None:
    commands = Scripted(**{stopped: stop})
    with pytest.raises(
        Interrupted, match=f"stopped in {stopped}; the same command goes on with --resume"
    ):
        run(tmp_path / "out", commands)
    told = json.loads((tmp_path / "out" / "pipeline.json").read_text())
    assert told["status"] == "interrupted"
    before = list(commands.ran)
    assert run(tmp_path / "out", commands, resume=True)["status"] == "finished"
    assert commands.ran[len(before)] == (stopped, True), (
        "the stopped stage resumes, the finished ones are left alone"
    )
    assert [name for name, _ in commands.ran].count("pairs") == 1


def test_a_measurement_that_was_stopped_begins_anew(tmp_path: Path) -> None:
    commands = Scripted(pairs=Interrupted("stopped"))
    with pytest.raises(Interrupted):
        run(tmp_path / "out", commands)
    run(tmp_path / "out", commands, resume=True)
    assert commands.ran == [("sft", False), ("pairs", False), ("pairs", False), ("dpo", False)]


def test_pairs_that_were_not_written_yet_are_written_from_the_finished_measurement(
    tmp_path: Path,
) -> None:
    """As after a kill between the measurement's end and the file."""
    commands = Scripted(dpo=Interrupted("stopped"))
    with pytest.raises(Interrupted):
        run(tmp_path / "out", commands)
    pairs = tmp_path / "out" / "pairs" / "pairs.jsonl"
    pairs.unlink()
    run(tmp_path / "out", commands, resume=True)
    assert pairs.is_file() and [name for name, _ in commands.ran].count("pairs") == 1


def test_a_kill_leaves_no_end_and_the_next_one_goes_on(tmp_path: Path) -> None:
    """A killed launcher writes no summary: run.json without one is a run that was begun."""

    class Killed(BaseException):
        pass

    commands = Scripted(dpo=Killed())
    with pytest.raises(Killed):
        run(tmp_path / "out", commands)
    (tmp_path / "out" / "dpo" / "summary.json").unlink()
    assert json.loads((tmp_path / "out" / "pipeline.json").read_text())["status"] == "running"
    run(tmp_path / "out", commands, resume=True)
    assert commands.ran[-2:] == [("dpo", False), ("dpo", True)]


def test_a_failure_names_its_stage_and_stops_there(tmp_path: Path) -> None:
    commands = Scripted(pairs=EngineError("rollout-0 ended"))
    with pytest.raises(EngineError, match="stage pairs: rollout-0 ended"):
        run(tmp_path / "out", commands)
    told = json.loads((tmp_path / "out" / "pipeline.json").read_text())
    assert (told["status"], told["error"]) == ("failed", "stage pairs: rollout-0 ended")
    assert [stage["status"] for stage in told["stages"]] == ["finished", "interrupted", "to do"]


def test_a_loop_runs_its_rounds_in_folders_of_their_own(tmp_path: Path) -> None:
    pairs, dpo = DECLARED["stages"]["pairs"], DECLARED["stages"]["dpo"]
    loop = {"rounds": {"repeat": 2, "stages": {"pairs": pairs, "dpo": dpo}}}
    commands = Scripted()
    run(tmp_path / "out", commands, declared={"model": "m", "stages": loop})
    assert [name for name, _ in commands.ran] == ["pairs-1", "dpo-1", "pairs-2", "dpo-2"]


def test_the_folder_is_this_pipelines_or_refused(tmp_path: Path) -> None:
    root = tmp_path / "out"
    with pytest.raises(RunFolderError, match="--resume needs the folder of a pipeline"):
        check_folder(root, DECLARED, resume=True)
    run(root, Scripted())
    with pytest.raises(RunFolderError, match="holds this pipeline, finished"):
        check_folder(root, DECLARED, resume=True)
    with pytest.raises(RunFolderError, match="holds another pipeline"):
        check_folder(root, {**DECLARED, "model": "other"}, resume=True)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunFolderError, match="must be new or empty"):
        check_folder(tmp_path, DECLARED, resume=False)


def test_everything_that_can_be_checked_is_checked_before_the_first_stage(
    tmp_path: Path,
) -> None:
    declared = {
        "model": "m",
        "stages": {**DECLARED["stages"], "after": {"command": "sft", "dataset": "nowhere"}},
    }
    pipeline = parse_pipeline({**declared, "output": str(tmp_path / "out")}, name="mine")
    commands, shown = Scripted(), list[str]()
    with pytest.raises(DataError, match="stage after: no such dataset"):
        check_pipeline(pipeline, steps_of(pipeline), commands.check, show=shown.append)
    assert commands.checked == ["m d", "m d", "m nowhere"], (
        "a policy to come is checked as what it begins from"
    )
    assert any(
        "pairs.jsonl from an earlier stage; checked in full when that is there" in line
        for line in shown
    )
    assert not (tmp_path / "out").exists()


def test_a_stop_that_comes_as_a_stage_ends_ends_the_pipeline_too(tmp_path: Path) -> None:
    class Stopped(Scripted):
        def run(self, config: AnyConfig, resume: bool) -> dict[str, Any]:
            return super().run(config, resume) | {"stop_asked": True}

    pipeline = parse_pipeline({**DECLARED, "output": str(tmp_path / "out")}, name="p")
    commands = Stopped()
    with pytest.raises(Interrupted, match="stopped in sft; the same command goes on"):
        run_pipeline(
            pipeline,
            steps_of(pipeline),
            commands.run,
            declared=DECLARED,
            resume=False,
            say=lambda line: None,
        )
    assert [name for name, _ in commands.ran] == ["sft"]


ROLLOUTS = {"dataset": "d", "rewards": ["exact_answer"]}


def configs(**told: Any) -> list[AnyConfig]:
    pipeline = parse_pipeline({"model": "m", "output": "out", **told}, name="mine")
    return [step_config(step, pipeline) for step in steps_of(pipeline)]


def test_a_stage_is_the_run_that_its_command_would_make_of_the_same_keys() -> None:
    sft, rloo, pairs = configs(
        defaults={"seed": 3, "group_size": 4},
        stages={
            "sft": {"dataset": "d", "trl": {"max_length": "64"}},
            "grpo": {**ROLLOUTS, "preset": "rloo"},
            "pairs": ROLLOUTS,
        },
    )
    assert isinstance(sft, TuneConfig) and sft.trl == {"max_length": 64}
    assert (sft.algorithm, rloo.algorithm, pairs.algorithm) == ("sft", "grpo", "eval")
    assert {sft.seed, rloo.seed, pairs.seed} == {3}, (
        "a default is for every stage that knows its key"
    )
    assert rloo.model_dump()["group_size"] == 4 and rloo.model_dump()["advantage"] == "rloo"
    assert [config.output for config in (sft, rloo, pairs)] == [
        "out/sft",
        "out/grpo",
        "out/pairs",
    ]


def test_a_preset_works_in_a_stage_as_on_the_command_line() -> None:
    (grpo,) = configs(stages={"grpo": {**ROLLOUTS, "preset": "dapo", "max_tokens": 100}})
    assert grpo.trl["epsilon_high"] == 0.28
    assert [reward["reward"] for reward in grpo.model_dump()["rewards"]] == [
        "exact_answer",
        "overlong",
    ]


def test_an_error_names_its_stage() -> None:
    with pytest.raises(ConfigError, match="stage sft: no key step; did you mean 'steps'"):
        configs(stages={"sft": {"dataset": "d", "step": 3}})


def test_what_is_not_there_yet_is_with_stand_ins_for_where_that_can_be() -> None:
    pipeline = parse_pipeline(
        {
            "model": "m",
            "output": "out",
            "stages": {
                "sft": {"dataset": "d"},
                "pairs": ROLLOUTS,
                "dpo": {"dataset": "${pairs.dataset}"},
            },
        },
        name="mine",
    )
    sft, pairs, dpo = steps_of(pipeline)
    assert with_stand_ins(sft) == sft
    ready = with_stand_ins(pairs)
    assert (
        ready is not None
        and ready.keys["model"] == "m"
        and pairs.keys["model"] == "out/sft/model"
    )
    assert with_stand_ins(dpo) is None


@pytest.mark.parametrize(
    ("figures", "told"),
    [
        ({"reward_first": 0.2, "reward_last": 0.9, "steps": 40}, "reward 0.200 -> 0.900"),
        ({"loss_first": 2.0, "loss_last": 1.0}, "loss 2.000 -> 1.000"),
        (
            {
                "loss_first": 2.0,
                "loss_last": 1.0,
                "held_out": {"before": {"loss": 2.5}, "after": {"loss": 1.5}},
            },
            "held-out loss 2.500 -> 1.500",
        ),
        (
            {
                "loss_first": 2.0,
                "held_out": {"before": {"accuracy": 0.5}, "after": {"accuracy": 0.75}},
            },
            "held-out accuracy 0.500 -> 0.750",
        ),
        (
            {"reward": 0.25, "pass@1": 0.25, "num_pairs": 12},
            "12 pairs, reward 0.250, pass@1 0.250",
        ),
        ({"reward_first": None, "reward_last": None, "held_out": None}, ""),
        ({}, ""),
    ],
)
def test_the_figure_that_tells_most(figures: dict[str, Any], told: str) -> None:
    assert headline(figures) == told
