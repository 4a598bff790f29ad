"""Pipelines: how a file is parsed, how its stages run (by commands of the test's own), and how pairs are made."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ycore.api import pipelines
from ycore.api.pipelines import (
    COMMANDS,
    Pipeline,
    Stage,
    make_pairs,
    parse_pipeline,
    report_rows,
    run_pipeline,
    stage_config,
    write_pairs,
)
from ycore.config.schema import AnyConfig, TuneConfig
from ycore.data.examples import load_examples
from ycore.errors import (
    ConfigError,
    DataError,
    EngineError,
    Interrupted,
    RunError,
    RunFolderError,
)
from ycore.evaluation.evaluator import _write_completions
from ycore.run.claim import AS_IT_WAS, check_claim, claim
from ycore.run.files import TRACKER_GROUP, ImageStore, RunFolder, png_of, write_json_atomic
from ycore.types import IMAGE_MARK, Completion, Draw, Group, Prompt, Score

SFT = {"dataset": "chats.jsonl"}
PAIRS = {"dataset": "prompts.jsonl", "rewards": ["exact_answer"]}


def parsed(**keys: Any) -> Pipeline:
    return parse_pipeline({"model": "m", **keys}, name="mine")


def test_stages_keep_their_order_and_name_their_command_or_are_called_like_it() -> None:
    pipeline = parsed(
        stages={"sft": SFT, "judge": {"command": "reward", "dataset": "pairs.jsonl"}}
    )
    assert [(stage.name, stage.command) for stage in pipeline.stages] == [
        ("sft", "sft"),
        ("judge", "reward"),
    ]
    assert pipeline.folder == Path("runs/mine")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"stages": {}}, "stages must be"),
        ({"stages": [1]}, "stages must be a mapping; it is [1]"),
        ({"stage": {}}, "a pipeline: no key stage; did you mean 'stages'?"),
        ({"stages": {"first": SFT}}, "stage first: its command is one of grpo"),
        ({"stages": {"warm": {"command": "stf"}}}, "did you mean 'sft'?"),
        ({"stages": {"a/b": {"command": "sft"}}}, "a name is letters, digits, - and _"),
        ({"stages": {"sft": {"output": "x"}}}, "stage sft: output is the pipeline's own"),
        ({"stages": {"sft": 3}}, "stages.sft must be a mapping; it is 3"),
        (
            {"stages": {"pairs": {"compare": "some"}}},
            "compare is best-worst or all; it is 'some'",
        ),
        ({"seed": -1, "stages": {"sft": SFT}}, "seed must be at least 0; it is -1"),
    ],
)
def test_an_error_names_its_place(keys: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(**keys)
    assert expected in str(caught.value)


def test_set_changes_a_stage_an_element_of_a_list_and_keys_of_the_pipeline() -> None:
    file = {
        "stages": {
            "sft": {"dataset": "d", "trl": {"beta": 1}},
            "grpo": {"dataset": "d", "rewards": [{"reward": "a"}, {"reward": "b"}]},
        }
    }
    sets = [
        "sft.trl.learning_rate=0.1",
        "grpo.rewards.1.weight=0.5",
        "model=m",
        "defaults.seed=3",
    ]
    pipeline = parse_pipeline(
        file, name="mine", sets=sets, options={"output": "out", "model": None}
    )
    sft, grpo = pipeline.stages
    assert sft.keys["trl"] == {"beta": 1, "learning_rate": 0.1}
    assert grpo.keys["rewards"] == [{"reward": "a"}, {"reward": "b", "weight": 0.5}]
    assert (sft.keys["model"], sft.keys["seed"], pipeline.folder) == ("m", 3, Path("out"))
    assert file["stages"]["sft"]["trl"] == {"beta": 1}, "the declaration itself is not changed"
    with pytest.raises(ConfigError, match="the list has 2, counted from 0"):
        parse_pipeline(file, name="mine", sets=["grpo.rewards.2.weight=0.5"])
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        parse_pipeline(file, name="mine", sets=["grpoo.steps=7"])


def test_every_command_that_trains_can_be_a_stage() -> None:
    assert {"sft", "reward", "dpo", "kto", "grpo", "eval", "pairs"} <= set(COMMANDS)


def stages_of(**keys: Any) -> list[Stage]:
    return list(parse_pipeline({"output": "out", **keys}, name="mine").stages)


def test_each_stage_begins_from_the_policy_that_the_last_one_made() -> None:
    sft, reward, grpo, after = stages_of(
        model="m",
        stages={
            "sft": {"dataset": "d"},
            "reward": {"dataset": "pairs.jsonl"},
            "grpo": {"dataset": "d", "rewards": ["rm:${reward.model}"]},
            "after": {"command": "eval", "dataset": "d"},
        },
    )
    assert [stage.keys["model"] for stage in (sft, reward, grpo, after)] == [
        "m", "out/sft/model", "out/sft/model", "out/grpo/model",
    ]  # fmt: skip
    assert grpo.keys["rewards"] == ["rm:out/reward/model"]
    assert [stage.folder for stage in (sft, after)] == [Path("out/sft"), Path("out/after")]


def test_a_policy_to_come_is_checked_as_the_model_that_it_starts_from() -> None:
    """A reward model or pairs to come cannot be checked."""
    sft, teacher, reward, grpo, dpo, after = stages_of(
        model="m",
        stages={
            "sft": {"dataset": "d"},
            "big": {"command": "sft", "model": "other", "dataset": "d"},
            "reward": {"dataset": "p"},
            "grpo": {"dataset": "d", "rewards": ["rm:${reward.model}"]},
            "dpo": {"dataset": "d", "model": "${sft.model}"},
            "after": {"command": "eval", "dataset": "d", "rewards": ["teacher:${big.model}"]},
        },
    )
    assert sft.check_keys == sft.keys and grpo.check_keys is None
    assert reward.check_keys == {"model": "other", "dataset": "p"}
    assert dpo.check_keys == {"model": "m", "dataset": "d"}
    assert after.check_keys is not None and after.check_keys["rewards"] == ["teacher:other"]
    assert teacher.keys["model"] == "other" and after.keys["model"] == "out/dpo/model"


@pytest.mark.parametrize("reference", ["${later.model}", "${first.model}", "${model}"])
def test_a_reference_to_nothing_is_refused(reference: str) -> None:
    with pytest.raises(
        ConfigError, match="is nothing that an earlier stage makes; by then there are none"
    ):
        stages_of(stages={"first": {"command": "sft", "model": "x", "dataset": reference}})


def test_a_reference_says_what_there_is() -> None:
    stages = {"sft": {"model": "m", "dataset": "d"}, "dpo": {"dataset": "${sft.dataset}"}}
    with pytest.raises(
        ConfigError, match=r"stage dpo: \$\{sft.dataset\} is nothing.*sft.output"
    ):
        stages_of(stages=stages)
    with pytest.raises(ConfigError, match=r"did you mean 'sft\.model'"):
        stages_of(stages={**stages, "dpo": {"dataset": "${sfd.model}"}})


def test_a_pipeline_begins_from_a_model() -> None:
    with pytest.raises(ConfigError, match=r"stage sft: \$\{model\} is nothing"):
        stages_of(stages={"sft": {"dataset": "d"}})


def test_the_seed_of_a_pipeline_tells_its_runs_apart() -> None:
    stages = {"sft": SFT, "dpo": {"dataset": "p", "seed": 7}}
    sft, dpo = stages_of(model="m", seed=2, defaults={"seed": 3}, stages=stages)
    assert (sft.keys["seed"], dpo.keys["seed"]) == (2003, 2007)


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

    def check(self, config: AnyConfig, *, resume: bool) -> list[tuple[str, str]]:
        self.checked.append(f"{config.model} {config.dataset}")
        options = AS_IT_WAS if resume else None
        check_claim(RunFolder(Path(config.output)), config, resume=options)
        if config.dataset == "nowhere":
            raise DataError("no such dataset")
        return [("model", config.model)]

    def run(self, config: AnyConfig, *, resume: bool) -> dict[str, Any]:
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


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a pipeline in a folder by these commands."""

    def run_in(
        root: Path,
        commands: Scripted,
        *,
        resume: bool = False,
        declared: dict[str, Any] = DECLARED,
        lines: list[str] | None = None,
    ) -> dict[str, Any]:
        monkeypatch.setattr(pipelines, "stage_plan", commands.check)
        monkeypatch.setattr(pipelines, "run_stage_command", commands.run)
        pipeline = parse_pipeline({**declared, "output": str(root)}, name="mine")
        say = (lines if lines is not None else []).append
        return run_pipeline(pipeline, resume=resume, dry_run=False, say=say)

    return run_in


def test_each_stage_gets_what_the_last_one_made(run: Any, tmp_path: Path) -> None:
    root, commands = tmp_path / "out", Scripted()
    report = run(root, commands)
    assert commands.ran == [("sft", False), ("pairs", False), ("dpo", False)]
    config = json.loads((root / "dpo" / "run.json").read_text())["config"]
    assert (config["model"], config["dataset"]) == (
        f"{root}/sft/model",
        f"{root}/pairs/pairs.jsonl",
    )
    assert json.loads((root / "pairs" / "pairs.jsonl").read_text())["chosen_reward"] == 2.0, (
        "by the stage's weights"
    )
    assert report == json.loads((root / "pipeline.json").read_text())
    assert report["status"] == "finished"
    rewards = "reward_first 0.250, reward_last 0.500"
    assert report_rows(report) == [
        ("sft", f"sft: finished, 2 s, {rewards}"),
        ("pairs", f"pairs: finished, 2 s, 1 pairs, {rewards}"),
        ("dpo", f"dpo: finished, 2 s, {rewards}"),
    ]
    report["stages"][1]["figures"] = {"held_out": {"after": {"accuracy": 0.75}}, "reward": None}
    assert report_rows(report)[1] == ("pairs", "pairs: finished, accuracy 0.750")


@pytest.mark.parametrize("outer_group", [None, "family"])
def test_stages_are_one_group_of_trackers(
    outer_group: str | None, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TRACKER_GROUP, raising=False)
    if outer_group is not None:
        monkeypatch.setenv(TRACKER_GROUP, outer_group)
    run(tmp_path / "out", commands := Scripted())
    assert (
        commands.groups == [outer_group or "out"] * 3
        and os.environ.get(TRACKER_GROUP) == outer_group
    )


@pytest.mark.parametrize("stopped", ["sft", "dpo"])
@pytest.mark.parametrize("stop", [Interrupted("stopped after step 1"), KeyboardInterrupt()])
def test_an_interrupt_is_one_line_and_the_stage_goes_on_inside(
    stopped: str, stop: BaseException, run: Any, tmp_path: Path
) -> None:
    commands = Scripted(**{stopped: stop})
    with pytest.raises(
        Interrupted, match=f"stopped in {stopped}; the same command goes on with --resume"
    ):
        run(tmp_path / "out", commands)
    stored = json.loads((tmp_path / "out" / "pipeline.json").read_text())
    assert stored["status"] == "interrupted"
    before = list(commands.ran)
    assert run(tmp_path / "out", commands, resume=True)["status"] == "finished"
    assert commands.ran[len(before)] == (stopped, True), (
        "the stopped stage resumes, the finished ones are left alone"
    )
    assert [name for name, _ in commands.ran].count("pairs") == 1


def test_a_measurement_that_was_stopped_begins_anew(run: Any, tmp_path: Path) -> None:
    commands = Scripted(pairs=Interrupted("stopped"))
    with pytest.raises(Interrupted):
        run(tmp_path / "out", commands)
    run(tmp_path / "out", commands, resume=True)
    assert commands.ran == [("sft", False), ("pairs", False), ("pairs", False), ("dpo", False)]


def test_pairs_that_were_not_written_yet_are_written_from_the_finished_measurement(
    run: Any,
    tmp_path: Path,
) -> None:
    """A launcher that was killed between the measurement's end and the file leaves no pairs."""
    commands = Scripted(dpo=Interrupted("stopped"))
    with pytest.raises(Interrupted):
        run(tmp_path / "out", commands)
    pairs = tmp_path / "out" / "pairs" / "pairs.jsonl"
    pairs.unlink()
    run(tmp_path / "out", commands, resume=True)
    assert pairs.is_file() and [name for name, _ in commands.ran].count("pairs") == 1


def test_a_kill_leaves_no_end_and_the_next_one_goes_on(run: Any, tmp_path: Path) -> None:
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


def test_a_failure_names_its_stage_and_stops_there(run: Any, tmp_path: Path) -> None:
    commands = Scripted(pairs=EngineError("rollout-0 ended"))
    with pytest.raises(EngineError, match="stage pairs: rollout-0 ended"):
        run(tmp_path / "out", commands)
    stored = json.loads((tmp_path / "out" / "pipeline.json").read_text())
    assert (stored["status"], stored["error"]) == ("failed", "stage pairs: rollout-0 ended")
    assert [stage["status"] for stage in stored["stages"]] == [
        "finished",
        "interrupted",
        "to do",
    ]


def test_the_folder_is_this_pipelines_or_refused(run: Any, tmp_path: Path) -> None:
    root = tmp_path / "out"
    with pytest.raises(RunFolderError, match="--resume needs the folder of a pipeline"):
        run(root, Scripted(), resume=True)
    run(root, Scripted())
    assert run(root, commands := Scripted(), resume=True)["status"] == "finished"
    assert commands.ran == [], "what is finished is left alone"
    with pytest.raises(RunFolderError, match="holds another pipeline"):
        run(root, Scripted(), resume=True, declared={**DECLARED, "model": "other"})
    with pytest.raises(RunFolderError, match=r"must be new or empty.*go on with --resume"):
        run(root, Scripted())


def test_everything_that_can_be_checked_is_checked_before_the_first_stage(
    run: Any, tmp_path: Path
) -> None:
    after = {"command": "sft", "dataset": "nowhere"}
    declared = {"model": "m", "stages": {**DECLARED["stages"], "after": after}}
    lines: list[str] = []
    commands = Scripted()
    with pytest.raises(DataError, match="stage after: no such dataset"):
        run(tmp_path / "out", commands, declared=declared, lines=lines)
    assert commands.checked == ["m d", "m d", "m nowhere"], (
        "a policy to come is checked as what it begins from"
    )
    assert any("it takes what an earlier stage makes" in line for line in lines)
    assert not (tmp_path / "out").exists()


def test_a_stop_that_comes_as_a_stage_ends_ends_the_pipeline_too(
    run: Any, tmp_path: Path
) -> None:
    class Stopped(Scripted):
        def run(self, config: AnyConfig, *, resume: bool) -> dict[str, Any]:
            return super().run(config, resume=resume) | {"stop_asked": True}

    commands = Stopped()
    with pytest.raises(Interrupted, match="stopped in sft; the same command goes on"):
        run(tmp_path / "out", commands)
    assert [name for name, _ in commands.ran] == ["sft"]


ROLLOUTS = {"dataset": "d", "rewards": ["exact_answer"]}


def configs(**keys: Any) -> list[AnyConfig]:
    return [stage_config(stage, stage.keys) for stage in stages_of(model="m", **keys)]


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


def test_a_default_may_be_a_field_of_trl_and_must_be_a_key_of_some_stage() -> None:
    """Both were dropped without a word."""
    stages = {"sft": {"dataset": "d"}, "grpo": ROLLOUTS}
    sft, grpo = configs(defaults={"learning_rate": 7e-5, "epsilon": 0.1}, stages=stages)
    assert sft.trl == {"learning_rate": 7e-5}
    assert grpo.trl == {"learning_rate": 7e-5, "epsilon": 0.1}
    for key in ("max_lenght", "trl"):
        with pytest.raises(ConfigError, match=f"no stage has the key {key}"):
            parsed(defaults={key: 9}, stages=stages)


@pytest.mark.parametrize(
    ("defaults", "keys", "trl"),
    [
        ({"learning_rate": 1e-5}, {"trl": {"learning_rate": 2e-5}}, {"learning_rate": 2e-5}),
        ({"trl": {"learning_rate": 1e-5}}, {"learning_rate": 2e-5}, {"learning_rate": 2e-5}),
        ({"max_steps": 3}, {"steps": 2}, {}),
    ],
)
def test_a_key_of_a_stage_is_over_a_default_in_any_spelling(
    defaults: dict[str, Any], keys: dict[str, Any], trl: dict[str, Any]
) -> None:
    (sft,) = configs(defaults=defaults, stages={"sft": {"dataset": "d", "steps": 2} | keys})
    assert sft.trl == trl and sft.steps == 2


def test_a_stage_that_only_samples_gets_no_default_of_training() -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    defaults = {"report_to": "tensorboard", "learning_rate": 1e-5, "temperature": 0.5}
    defaults |= thinking
    sft, pairs = configs(
        defaults=defaults, stages={"sft": {"dataset": "d"}, "grpo": ROLLOUTS, "pairs": ROLLOUTS}
    )[::2]
    assert sft.trl == {"report_to": "tensorboard", "learning_rate": 1e-5}
    assert pairs.trl == {"temperature": 0.5, **thinking}


def test_a_pipeline_may_be_written_to_the_home_folder() -> None:
    assert parsed(stages={"sft": SFT}, output="~/x").folder == Path.home() / "x"


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


CHAT = [{"role": "user", "content": "2 + 2?"}]


def row(number: int, text: str, *rewards: float | None, prompt: Any = "ask") -> dict[str, Any]:
    return {"row": number, "prompt": prompt, "completion": text, "rewards": list(rewards)}


def pairs(
    rows: list[dict[str, Any]],
    *,
    compare: Any = "best-worst",
    weights: tuple[float, ...] = (1.0,),
) -> list[Any]:
    made = make_pairs(rows, weights, compare=compare)
    return [
        (pair["chosen"], pair["rejected"], pair["chosen_reward"], pair["rejected_reward"])
        for pair in made
    ]


def test_the_best_and_the_worst_of_each_prompt() -> None:
    rows = [
        row(0, "a", 0.2),
        row(0, "b", 0.9),
        row(0, "c", 0.5),
        row(1, "d", 1.0),
        row(1, "e", 0.0),
    ]
    assert pairs(rows) == [("b", "a", 0.9, 0.2), ("d", "e", 1.0, 0.0)]


def test_every_two_that_differ_and_of_the_same_texts_one() -> None:
    rows = [row(0, "7", 1.0), row(0, "8", 0.0), row(0, "7", 1.0), row(0, "9", 0.0)]
    assert pairs(rows, compare="all") == [("7", "8", 1.0, 0.0), ("7", "9", 1.0, 0.0)]


@pytest.mark.parametrize("compare", ["best-worst", "all"])
def test_a_text_is_never_better_than_itself(compare: str) -> None:
    """A judge may reward the same text twice, and differently."""
    assert pairs([row(0, "7", 1.0), row(0, "7", 0.0)], compare=compare) == []
    rows = [row(0, "7", 1.0), row(0, "8", 0.5), row(0, "7", 0.0)]
    assert len(pairs(rows, compare="all")) == 1


def test_a_prompt_whose_rewards_are_equal_is_left_out() -> None:
    assert (
        pairs([row(0, "a", 1.0), row(0, "b", 1.0 + 1e-9), row(1, "c", None), row(2, "d", 1.0)])
        == []
    )


def test_weights_and_unscored_completions() -> None:
    rows = [row(0, "a", 1.0, 0.0), row(0, "b", None, 1.0), row(0, "c", None, None)]
    assert pairs(rows, weights=(0.5, 2.0)) == [("b", "a", 2.0, 0.5)]


def test_a_chat_gets_turns() -> None:
    (pair,) = make_pairs(
        [row(0, "4", 1.0, prompt=CHAT), row(0, "5", 0.0, prompt=CHAT)],
        [1.0],
        compare="best-worst",
    )
    assert pair["prompt"] == CHAT
    assert pair["chosen"] == [{"role": "assistant", "content": "4"}]
    assert pair["rejected"] == [{"role": "assistant", "content": "5"}]


@given(
    st.lists(st.floats(-2, 2, width=16), min_size=1, max_size=6),
    st.sampled_from(["best-worst", "all"]),
)
def test_the_chosen_is_always_the_better(rewards: list[float], compare: str) -> None:
    rows = [row(0, str(place), reward) for place, reward in enumerate(rewards)]
    made = pairs(rows, compare=compare)
    assert all(better > worse for _, _, better, worse in made)
    if compare == "best-worst" and made:
        assert made == [(made[0][0], made[0][1], max(rewards), min(rewards))]


def test_the_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    rows = [row(0, "é", 1.0), row(0, "b", 0.0)]
    (tmp_path / "completions.jsonl").write_text(
        "".join(json.dumps(completion) + "\n" for completion in rows)
    )
    assert write_pairs(tmp_path, weights=[1.0], compare="best-worst") == 1
    assert json.loads((tmp_path / "pairs.jsonl").read_text())["chosen"] == "é"
    with pytest.raises(RunError, match="so there is no pair; raise num_samples"):
        write_pairs(tmp_path, weights=[0.0], compare="best-worst")


def test_pairs_show_what_their_completions_were_written_for(tmp_path: Path) -> None:
    """The pictures and the tools of a prompt, which stand beside its turns."""
    from PIL import Image as Pillow

    image = ImageStore(RunFolder(tmp_path).images).put(
        png_of(Pillow.new("RGB", (2, 2), "red")), "row 0"
    )
    tool = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    prompt = Prompt(
        0,
        [{"role": "user", "content": f"{IMAGE_MARK}Which colour?"}],
        images=(image,),
        tools=(tool,),
        template_arguments={"enable_thinking": False},
    )
    completions = tuple(Completion((1,), None, text, "stop", 0) for text in ("Red.", "Blue."))
    scores = ((Score(1.0),), (Score(0.0),))
    with (tmp_path / "completions.jsonl").open("w") as file:
        _write_completions(Group(Draw(0, prompt, (1,)), completions, scores), file)
    assert write_pairs(tmp_path, weights=[1.0], compare="best-worst") == 1
    (pair,) = map(json.loads, (tmp_path / "pairs.jsonl").read_text().splitlines())
    assert pair.pop("tools") == [tool]
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair))  # TRL has no tools beside pictures
    settings = TuneConfig(
        algorithm="dpo",
        model="m",
        dataset=str(tmp_path / "pairs.jsonl"),
        output="o",
        held_out=0,
    )
    (example,) = load_examples(settings, as_chat=True).train
    assert example["images"] == [image] and example["prompt"][0]["content"][0] == {
        "type": "image"
    }
    assert example["chat_template_kwargs"] == {"enable_thinking": False}


def test_pairs_are_of_single_turns() -> None:
    """A completion in several turns is a transcript, which no model is to write."""
    with pytest.raises(ConfigError, match=r"stage pairs: a pair's answers are single turns"):
        configs(stages={"pairs": PAIRS | {"tools": ["python"]}})
