"""Which engines judges and reward models get, where, and what is refused before anything starts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scripted_teacher import teacher_at
from tests.tiny_model import write_tiny_model
from ycore.config.learners import DistillConfig
from ycore.config.resolve import resolve
from ycore.config.schema import RewardConfig, RunConfig
from ycore.data.prompts import PromptSet
from ycore.engine.commands import engine_command, engine_environment
from ycore.engine.kinds import TRANSFORMERS, VLLM
from ycore.errors import ConfigError, UserError
from ycore.judge.declaration import with_declarations
from ycore.launch.device_memory import RunMemory
from ycore.launch.engines import EnginePlan, plan_engines
from ycore.launch.layout import ONE_RANK, Machine, Site
from ycore.plan.sharing import DeviceSharing
from ycore.run.files import RunFolder
from ycore.scoring.model_scorers import check_replayed_tokens
from ycore.scoring.scorers import check_models, check_rows, check_run_placement, served_models

SCORE = {"verdict": {"kind": "score"}}
CONFIG = {
    "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "hidden_size": 64,
    "max_position_embeddings": 2048, "architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"},
}  # fmt: skip


def check_scorers(config: RunConfig, columns: list[str], *, engine: str) -> list[str]:
    check_rows(config, PromptSet([], tuple(columns), str, is_chat=True, shows=None))
    return check_models(config, engine=engine)


def config_of(*rewards: Any, **settings: Any) -> RunConfig:
    options: dict[str, Any] = {
        "model": "policy",
        "dataset": "task:addition",
        "output": "out",
        **settings,
    }
    config_class = DistillConfig if settings.get("algorithm") == "distill" else RunConfig
    return config_class(**options, rewards=list(rewards))


def judge(name: str, **declared: Any) -> dict[str, Any]:
    return {"reward": f"judge:{name}", "args": {**SCORE, **declared}}


def planned(
    config: RunConfig,
    folder: Path,
    *,
    cores: int = 2,
    fetch: Callable[[str], Path] | None = None,
) -> EnginePlan:
    """On a CPU, an engine of each model a core."""
    site = Site(RunFolder(folder), ONE_RANK, Machine(tuple(range(cores)), ()))
    return plan_engines(config, site, fetch=fetch or (lambda name: folder))


@pytest.fixture(autouse=True)
def vllm_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ycore.engine.kinds.is_vllm_installed", lambda: True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_judges_of_one_model_share_engines_and_addresses_have_none() -> None:
    config = config_of(
        judge("a"),
        {"reward": "length"},
        judge("b", max_tokens=300, max_model_len=900),
        judge("c", model="other"),
        judge("d", base_url="http://x", model="far"),
        {"reward": "rm:scalar"},
        judge("e", model="policy"),
    )
    served = [
        (
            served_model.role,
            served_model.name,
            served_model.sources,
            served_model.max_new_tokens,
        )
        for served_model in served_models(config)
    ]
    assert served == [
        ("rollout", "policy", (), 0),
        ("judge", "policy", (0, 2, 6), 300),
        ("judge", "other", (3,), 256),
        ("reward_model", "scalar", (5,), 0),
    ]


def test_an_ensemble_is_served_model_by_model() -> None:
    config = config_of(
        {"reward": "rm:a"},
        {"reward": "rm:a+b"},
        {"reward": "rm:b+c", "args": {"max_model_len": 99}},
    )
    served = {
        served_model.name: (served_model.role, served_model.sources)
        for served_model in served_models(config)[1:]
    }
    assert served == {
        name: ("reward_model", sources)
        for name, sources in {"a": (0, 1), "b": (1, 2), "c": (2,)}.items()
    }


def test_every_slot_has_an_engine_of_every_model_beside_its_rollout_engine(
    folder: Path,
) -> None:
    config = config_of(
        judge("a"), judge("b", model="other", max_model_len=300), {"reward": "rm:scalar"}
    )
    fetched: list[str] = []

    def fetch(name: str) -> Path:
        fetched.append(name)
        return folder

    plans = planned(config, folder, fetch=fetch).served[1:]
    assert set(fetched) == {"policy", "other", "scalar"}
    assert [[engine.name for engine in plan.engines] for plan in plans] == [
        ["judge-0", "judge-1"],
        ["judge-2", "judge-3"],
        ["reward-model-0", "reward-model-1"],
    ]
    assert [[engine.cores for engine in plan.engines] for plan in plans] == [[(0,), (1,)]] * 3
    assert [plan.engines[0].max_model_len for plan in plans] == [2048, 300, 2048]
    assert {engine.max_num_seqs for plan in plans for engine in plan.engines} == {32}
    assert {engine.memory_gib for plan in plans for engine in plan.engines} == {1}
    scorers = planned(config, folder).as_json()["scorers"]
    assert scorers[0]["sources"] == [0] and scorers[2]["role"] == "reward_model"


def test_commands_are_those_of_the_role(folder: Path) -> None:
    made = planned(config_of(judge("a"), {"reward": "rm:scalar"}), folder, cores=1)
    specs = [engine for model in made.served for engine in model.engines]
    rollout, one_judge, reward_model = map(engine_command, specs)
    assert "ycore.engine.vllm_extension.PolicyWorker" in rollout
    assert "ycore.engine.vllm_extension.Worker" in one_judge, (
        "nothing can send a judge other weights"
    )
    assert reward_model[reward_model.index("--runner") + 1] == "pooling"
    assert engine_environment(specs[1])["VLLM_CPU_KVCACHE_SPACE"] == "1"


@pytest.mark.parametrize("sleeps", [True, False])
def test_on_a_device_each_scorer_has_the_share_that_was_planned(
    folder: Path, sleeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = {"rollout": [0.6], "judge": [0.3, 0.2], "reward_model": [0.1]}
    sharing = DeviceSharing(sleeps, "none", shares, "who sleeps")
    monkeypatch.setattr(RunMemory, "share", lambda self, models, num_slots: sharing)
    config = config_of(judge("a"), judge("b", model="other"), {"reward": "rm:scalar"})
    site = Site(RunFolder(folder), ONE_RANK, Machine((0,), ("0",)))
    made = plan_engines(config, site, fetch=lambda name: folder)
    specs = [engine for model in made.served for engine in model.engines]
    assert [spec.gpu_memory_utilization for spec in specs] == [0.6, 0.3, 0.2, 0.1]
    assert all(spec.sleeps == sleeps and spec.devices == ("0",) for spec in specs)
    assert {"--enable-sleep-mode" in engine_command(spec) for spec in specs} == {sleeps}
    assert made.note.endswith(
        "1 engine on device 0, beside judge-0, judge-1, reward-model-0; who sleeps"
    )


def test_a_plan_of_engines_in_a_line(folder: Path) -> None:
    alone = config_of({"reward": "length"})
    assert (
        planned(alone, folder, cores=1).note == "generating with vLLM: 1 engine on 1 CPU core"
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def classifier(folder: Path, model: Path, **changes: Any) -> str:
    """The tiny model's folder with another config."""
    target = folder / "classifier"
    target.mkdir()
    for file in model.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = (
        json.loads((model / "config.json").read_text())
        | {"id2label": {"0": "LABEL_0"}}
        | changes
    )
    (target / "config.json").write_text(json.dumps(config))
    return str(target)


def test_a_run_that_can_be_scored_is_told_line_by_line(tmp_path: Path, model: Path) -> None:
    scalar = classifier(tmp_path, model, architectures=["LlamaForSequenceClassification"])
    config = config_of(judge("a"), {"reward": f"rm:{scalar}"}, model=str(model))
    first, second = check_scorers(config, ["answer"], engine=VLLM)
    assert first == "judge a: the policy's base weights, pointwise, verdict by score"
    assert second.startswith("reward model ") and second.endswith("one number a completion")


@pytest.mark.parametrize(
    ("declared", "problem"),
    [
        ({"model": "no-such-folder/x/y"}, "judge a: .*no-such-folder"),
        (
            {"max_model_len": 100_000},
            "max_model_len is 100000, and its model has 512; lower it",
        ),
        (
            {"messages": [{"role": "user", "content": "{completion} {lvel} {how_to_answer}"}]},
            "'lvel', .*did you mean 'level'",
        ),
        (
            {"mode": "pairwise", "against": "reference", "reference_column": "gold"},
            "reference_column is 'gold'",
        ),
        (
            {"base_url": "http://x/v1", "model": "m", "api_key_env": "YCORE_NO_SUCH_KEY"},
            "YCORE_NO_SUCH_KEY .* not set",
        ),
    ],
)
def test_a_judge_that_cannot_score_the_run_is_refused(
    model: Path, declared: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        check_scorers(
            config_of(judge("a", **declared), model=str(model)),
            ["answer", "level"],
            engine=VLLM,
        )


def test_a_model_without_a_chat_template_cannot_judge(tmp_path: Path) -> None:
    plain = write_tiny_model(tmp_path / "plain", chat=False)
    with pytest.raises(UserError, match="no chat template; take an instruct model"):
        check_scorers(config_of(judge("a"), model=str(plain)), [], engine=VLLM)


def test_without_vllm_only_an_address_can_judge(model: Path) -> None:
    far = judge("a", base_url="http://x/v1", model="m")
    assert check_scorers(config_of(far), [], engine=TRANSFORMERS) == [
        "judge a: m at http://x/v1, pointwise, verdict by score"
    ]
    for reward in (judge("a"), {"reward": f"rm:{model}"}):
        with pytest.raises(
            UserError, match="runs in a vLLM engine, and this run generates with transformers"
        ):
            check_scorers(config_of(reward, model=str(model)), [], engine=TRANSFORMERS)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, "must be a sequence classifier with one label .* are LlamaForCausalLM"),
        (
            {
                "architectures": ["LlamaForSequenceClassification"],
                "id2label": {"0": "a", "1": "b"},
            },
            "has 2 labels",
        ),
    ],
)
def test_a_model_that_gives_no_single_number_is_refused(
    tmp_path: Path, model: Path, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        check_scorers(
            config_of({"reward": f"rm:{classifier(tmp_path, model, **changes)}"}),
            [],
            engine=VLLM,
        )


def test_a_run_carries_the_whole_declaration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("strict.yaml").write_text(
        "description: mine\nrubric: Is it right?\nverdict: {kind: score, max: 5}\n"
    )
    spec = {"reward": "judge:strict.yaml", "weight": 0.5, "args": {"retries": 3}}
    config = config_of(spec, {"reward": "length"})
    config = with_declarations(config.model_copy(update={"eval_rewards": config.rewards}))
    Path("strict.yaml").unlink()
    assert config.eval_rewards == config.rewards, "nor does what is measured beside it"
    assert config.rewards[0].model_dump(exclude_defaults=True) == {
        "reward": "judge:strict",
        "weight": 0.5,
        "args": {
            "rubric": "Is it right?",
            "verdict": {"kind": "score", "max": 5.0},
            "retries": 3,
        },
    }
    assert with_declarations(config) == config, "a resumed run needs no file"


def placed(placement: str) -> RunConfig:
    return RunConfig(
        model="m",
        dataset="d",
        rewards=[RewardConfig(reward="exact_answer")],
        output="o",
        placement=placement,
    )


def test_rollouts_alone_need_no_placement() -> None:
    for placement in ("dynamic", "colocated"):
        check_run_placement(placed(placement), served_models(placed(placement)), num_slots=2)
    with pytest.raises(ConfigError, match="leave --placement out"):
        check_run_placement(
            placed("split:1:1"), served_models(placed("split:1:1")), num_slots=2
        )


def test_nonsense_is_refused_before_slots_are_known() -> None:
    with pytest.raises(ConfigError, match="must be colocated"):
        check_run_placement(placed("everywhere"), [])


def test_a_teacher_has_an_engine_of_its_own_role_on_every_slot(folder: Path) -> None:
    config = config_of(
        {"reward": f"teacher:{folder}"}, {"reward": "length"}, algorithm="distill"
    )
    _, served = planned(config, folder).served
    assert [engine.name for engine in served.engines] == [
        "teacher-0",
        "teacher-1",
    ] and served.sources == (0,)
    words = engine_command(served.engines[0])
    assert words[words.index("--logprobs-mode") + 1] == "raw_logprobs"
    assert words[words.index("--served-model-name") + 1] == "teacher"


def test_a_run_folder_stands_for_the_model_that_it_trained(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    _, model = served_models(config_of({"reward": f"teacher:{tmp_path}"}))
    assert model.name == str(tmp_path / "model")


def test_a_teacher_with_another_tokenizer_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    policy, teacher = (write_tiny_model(tmp_path / name) for name in ("policy", "teacher"))
    config = config_of({"reward": f"teacher:{teacher}"}, model=str(policy))
    assert check_scorers(config, [], engine=VLLM) == [
        f"teacher {teacher}: found in {teacher}, the probability of each token"
    ]
    written = json.loads((teacher / "tokenizer.json").read_text())
    vocab = written["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (teacher / "tokenizer.json").write_text(json.dumps(written))
    message = f"teacher {teacher} has another tokenizer than the policy: 'a' is {vocab['b']} in the policy's and"
    with pytest.raises(ConfigError, match=message):
        check_scorers(config, [], engine=VLLM)
    with pytest.raises(ConfigError, match="take a teacher of the same family"):
        planned(config, tmp_path, fetch=Path)


def test_a_replay_reads_the_tokens_of_its_run_as_they_were(tmp_path: Path) -> None:
    """Tokens that the run did not have may come on top."""
    before, policy = (write_tiny_model(tmp_path / name) for name in ("before", "policy"))
    content = json.loads((policy / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["<more>"] = len(vocab)
    (policy / "tokenizer.json").write_text(json.dumps(content))
    check_replayed_tokens(policy, before)
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (policy / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"2 have other ids .*'a'; leave --model out"):
        check_replayed_tokens(policy, before)


def test_a_teacher_in_the_trainer_has_no_engine_and_is_compared_before_anything_starts(
    tmp_path: Path,
) -> None:
    policy, teacher = (write_tiny_model(tmp_path / name) for name in ("policy", "teacher"))
    settings = {"model": str(policy), "algorithm": "distill", "distill": {"divergence": "js"}}
    config = config_of({"reward": f"teacher:{teacher}"}, **settings)
    assert check_scorers(config, [], engine=TRANSFORMERS) == [
        f"teacher {teacher}: found in {teacher}, js, exact, in the trainer"
    ]
    assert [model.role for model in planned(config, tmp_path, fetch=Path).served] == ["rollout"]
    written = json.loads((teacher / "tokenizer.json").read_text())
    written["model"]["vocab"]["a"] = 999
    (teacher / "tokenizer.json").write_text(json.dumps(written))
    with pytest.raises(ConfigError, match="take a teacher of the same family"):
        planned(config, tmp_path, fetch=Path)
    served = config_of({"reward": f"teacher:{policy}"}, model=str(policy), algorithm="distill")
    with pytest.raises(
        ConfigError, match="install vLLM, or hold it in the trainer: --set distill"
    ):
        check_scorers(served, [], engine=TRANSFORMERS)


def test_a_teacher_at_an_address_reads_as_the_policy_or_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    policy, other = write_tiny_model(tmp_path / "policy"), write_tiny_model(tmp_path / "other")
    written = json.loads((other / "tokenizer.json").read_text())
    vocab = written["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(written))

    def config(address: str, **settings: Any) -> RunConfig:
        return config_of(
            {"reward": "teacher:big", "args": {"base_url": address}},
            model=str(policy),
            **settings,
        )

    with teacher_at(policy) as address:
        line = f"teacher big: at {address}, the probability of each token"
        assert check_scorers(config(address), [], engine=TRANSFORMERS) == [line]
        assert [
            model.role for model in planned(config(address), tmp_path, fetch=Path).served
        ] == ["rollout"]
        exact = config(address, algorithm="distill", distill={"divergence": "js"})
        with pytest.raises(ConfigError, match="needs the teacher's weights, and it is at http"):
            check_scorers(exact, [], engine=VLLM)
        with pytest.raises(
            ConfigError,
            match=r"nowhere/tokenize gives no tokens to compare with the policy's .*404",
        ):
            check_scorers(config(f"{address}/nowhere"), [], engine=VLLM)
    with teacher_at(other) as address:
        message = "another tokenizer than the policy: .* take one of the same family"
        with pytest.raises(ConfigError, match=message):
            check_scorers(config(address), [], engine=VLLM)
        with pytest.raises(ConfigError, match=message):
            planned(config(address), tmp_path, fetch=Path)
    with pytest.raises(ConfigError, match="gives no tokens to compare with the policy's"):
        check_scorers(config(address), [], engine=VLLM)  # the server has ended


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"reward": "teacher:"}, "teacher: needs a model's name: --teacher MODEL"),
        (
            {"reward": "teacher:t", "args": {"were": {}}},
            "teacher t: no key were; did you mean 'where'",
        ),
    ],
)
def test_a_teacher_that_cannot_be_read(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        with_declarations(config_of(spec))


@pytest.mark.parametrize(
    "reward",
    [
        "similarity",
        judge("a", mode="pairwise"),
        judge("a", mode="groupwise", verdict={"kind": "ranking"}),
    ],
)
@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"algorithm": "ppo", "group_size": 1}, "a group, and group_size is 1; take another"),
        ({"advantage": "remax"}, "--advantage remax scores a prompt's greedy completion alone"),
    ],
)
def test_a_reward_that_compares_a_group_scores_no_completion_alone(
    reward: Any, settings: dict[str, Any], rule: str
) -> None:
    options = {"algorithm": "grpo", "model": "m", "dataset": "d", "output": "o"}
    config: Any = resolve(options={**options, "rewards": [reward], **settings})
    with pytest.raises(ConfigError, match=rule):
        check_models(with_declarations(config), engine=VLLM)


def test_what_is_only_measured_may_compare_a_group() -> None:
    rewards = ["exact_answer", {"reward": "similarity", "weight": 0.0}]
    options = {"algorithm": "grpo", "model": "m", "dataset": "d", "output": "o"}
    config: Any = resolve(options={**options, "rewards": rewards, "advantage": "remax"})
    check_models(config, engine=VLLM)
