"""A folder belongs to one run, and some changes make a run another run."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ycore.config.schema import (
    EngineSettings,
    RewardConfig,
    RewardSettings,
    RunConfig,
    SandboxSettings,
    TurnSettings,
)
from ycore.config.trl_fields import fields_of
from ycore.errors import RunFolderError
from ycore.run.claim import (
    AS_IT_WAS,
    FREE,
    FREE_OF_TRL,
    Claim,
    Resume,
    check_claim,
    claim,
    contents_that_differ,
    files_fingerprint,
    in_words,
    model_fingerprint,
    settings_that_differ,
)
from ycore.run.files import RunFolder, make_private, read_json, read_run_id, write_json_atomic


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
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return RunFolder(tmp_path / "runs" / "one")


def claim_and_release(folder: RunFolder, *, resume: bool = False, **changes: Any) -> None:
    claim(folder, config_for(folder, **changes), resume=resume).release()


def test_a_new_folder_is_made_private_and_described(folder: RunFolder) -> None:
    check_claim(folder, config_for(folder), resume=None)
    assert not folder.root.exists()
    claim_and_release(folder)
    stored = read_json(folder.config)
    assert RunConfig(**stored["config"]) == config_for(folder)
    assert stored["versions"]["torch"]
    assert set(stored) == {"config", "command", "directory", "versions", "started", "resume"}
    assert folder.root.stat().st_mode & 0o777 == 0o700
    assert folder.logs.is_dir()
    assert folder.checkpoints.is_dir()


def test_checking_imports_no_torch() -> None:
    code = "import sys, ycore.run.claim as p; p.installed_versions(); print('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "False\n"
    )


def test_another_run_is_refused_and_the_difference_named(folder: RunFolder) -> None:
    claim_and_release(folder)
    with pytest.raises(
        RunFolderError, match=r"another run \(seed: 0 there, 7 here\).*--output"
    ):
        check_claim(folder, config_for(folder, seed=7), resume=None)
    with pytest.raises(
        RunFolderError, match=r"another run \(seed: 0 there, 7 here\).*--accept-changes"
    ):
        check_claim(folder, config_for(folder, seed=7), resume=AS_IT_WAS)
    check_claim(
        folder,
        config_for(folder, seed=7),
        resume=Resume(accept_changes=True),
    )


def test_a_nested_difference_is_named_by_its_whole_key(folder: RunFolder) -> None:
    claim_and_release(folder, trl={"learning_rate": 1e-5, "beta": 0.1})
    changed = config_for(folder, trl={"learning_rate": 2e-5, "beta": 0.1})
    with pytest.raises(
        RunFolderError, match=r"\(trl\.learning_rate: 1e-05 there, 2e-05 here\)"
    ):
        check_claim(folder, changed, resume=AS_IT_WAS)


def test_what_changes_nothing_that_is_learned_may_change(folder: RunFolder) -> None:
    claim_and_release(folder)
    more = {
        "steps": 200,
        "checkpoint_every": 3,
        "trl": {"save_total_limit": 5, "report_to": "tensorboard"},
    }
    check_claim(folder, config_for(folder, **more), resume=AS_IT_WAS)
    with pytest.raises(RunFolderError, match="steps: 100 there, 50 here"):
        check_claim(folder, config_for(folder, steps=50), resume=AS_IT_WAS)


def test_a_resumed_run_keeps_the_command_that_began_it(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its report said `ycore resume` where it says how to do it again."""
    monkeypatch.setattr(sys, "argv", ["ycore", "grpo", "--recipe", "quickstart"])
    claim_and_release(folder)
    begun = read_json(folder.config)
    monkeypatch.setattr(sys, "argv", ["ycore", "resume", str(folder.root)])
    claim_and_release(folder, resume=True, steps=200)
    stored = read_json(folder.config)
    assert stored["command"] == ["ycore", "grpo", "--recipe", "quickstart"]
    assert (stored["started"], stored["resume"]) == (begun["started"], True)
    assert stored["config"]["steps"] == 200


def test_the_same_run_goes_on_only_with_resume(folder: RunFolder) -> None:
    claim_and_release(folder)
    with pytest.raises(RunFolderError, match="--resume"):
        check_claim(folder, config_for(folder), resume=None)
    claim_and_release(folder, resume=True)
    assert read_json(folder.config)["resume"] is True


def test_a_finished_run_is_refused(folder: RunFolder) -> None:
    claim_and_release(folder)
    write_json_atomic(folder.summary, {"status": "finished"})
    with pytest.raises(RunFolderError, match="finished"):
        check_claim(folder, config_for(folder), resume=AS_IT_WAS)
    check_claim(folder, config_for(folder, steps=101), resume=AS_IT_WAS)
    check_claim(folder, config_for(folder), resume=Resume(step=50))
    write_json_atomic(folder.summary, {"status": "interrupted"})
    check_claim(folder, config_for(folder), resume=AS_IT_WAS)


@pytest.mark.parametrize("status", ["finished", "interrupted"])
def test_an_evaluation_never_goes_on(folder: RunFolder, status: str) -> None:
    claim_and_release(folder, algorithm="eval")
    write_json_atomic(folder.summary, {"status": status})
    with pytest.raises(
        RunFolderError,
        match="holds this evaluation already, and none goes on; choose another --outp",
    ):
        check_claim(folder, config_for(folder, algorithm="eval"), resume=None)


def test_foreign_files_are_refused_and_left_alone(folder: RunFolder) -> None:
    folder.root.mkdir(parents=True)
    (folder.root / "thesis.tex").write_text("mine")
    with pytest.raises(RunFolderError, match=r"holds thesis\.tex"):
        claim(folder, config_for(folder), resume=False)
    assert [path.name for path in folder.root.iterdir()] == ["thesis.tex"]


def test_a_claim_that_was_killed_half_way_can_be_repeated(folder: RunFolder) -> None:
    claim_and_release(folder)
    folder.config.unlink()
    claim_and_release(folder)


def test_nothing_to_resume_is_said(folder: RunFolder) -> None:
    with pytest.raises(RunFolderError, match=r"no run\.json"):
        check_claim(folder, config_for(folder), resume=AS_IT_WAS)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="is a file"):
        check_claim(
            RunFolder(tmp_path / "file"), config_for(RunFolder(tmp_path / "file")), resume=None
        )


def test_a_running_run_holds_its_folder(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ycore.run.claim._LOCK_WITHIN_S", 0.3)
    first_claim = claim(folder, config_for(folder), resume=False)
    with pytest.raises(RunFolderError, match="another ycore is running"):
        claim(folder, config_for(folder), resume=True)
    first_claim.release()
    claim_and_release(folder, resume=True)


CLAIMS = """
import sys, time
from pathlib import Path
from ycore.config.schema import RewardConfig, RunConfig
from ycore.errors import RunFolderError
from ycore.run import claim as claims
from ycore.run.files import write_json_atomic
from ycore.run.files import RunFolder

folder, seed = RunFolder(Path(sys.argv[1])), int(sys.argv[2])
check, checked = claims.check_claim, []

def check_slowly(*arguments, **more):
    check(*arguments, **more)
    if not checked:
        checked.append((folder.root.parent / f"checked-{seed}").touch())
        while len(list(folder.root.parent.glob("checked-*"))) < 2:
            time.sleep(0.01)

claims.check_claim = check_slowly
config = RunConfig(model="m", dataset="d", rewards=[RewardConfig(reward="exact_answer")], output=sys.argv[1], seed=seed)
try:
    held = claims.claim(folder, config, resume=False)
except RunFolderError as error:
    print(error)
    sys.exit(2)
write_json_atomic(folder.summary, {"status": "finished", "seed": seed})
held.release()
"""


def test_of_two_commands_on_one_folder_one_is_refused(tmp_path: Path) -> None:
    """Both find the folder empty before either has it; the second must look again once it has the lock."""
    command = [sys.executable, "-c", CLAIMS, str(tmp_path / "run")]
    both = [
        subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, text=True)
        for seed in (1, 2)
    ]
    said = [process.communicate(timeout=240)[0] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2]
    winner = 1 + [process.returncode for process in both].index(0)
    assert f"holds another run (seed: {winner} there, {3 - winner} here)" in said[2 - winner]
    folder = RunFolder(tmp_path / "run")
    assert (
        read_json(folder.config)["config"]["seed"]
        == read_json(folder.summary)["seed"]
        == winner
    )


def test_the_id_is_random_and_stays_the_folders(folder: RunFolder, tmp_path: Path) -> None:
    claim_and_release(folder)
    other = RunFolder(tmp_path / "other")
    claim_and_release(other)
    first = folder.run_id
    assert other.run_id != first
    claim_and_release(folder, resume=True)
    assert folder.run_id == RunFolder(folder.root).run_id == first
    folder.root.rename(tmp_path / "moved")
    assert RunFolder(tmp_path / "moved").run_id == first


def test_a_copy_of_a_folder_has_another_id(folder: RunFolder, tmp_path: Path) -> None:
    claim_and_release(folder)
    shutil.copytree(folder.root, tmp_path / "copy")
    copy = RunFolder(tmp_path / "copy")
    assert copy.run_id != folder.run_id, "before the copy is claimed"
    Claim(copy).release()
    kept = read_run_id(copy.lock)
    assert kept is not None and copy.run_id == kept != folder.run_id


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"run_id": "x"}'])
def test_a_damaged_lock_file_gets_a_new_id(folder: RunFolder, content: str) -> None:
    claim_and_release(folder)
    folder.lock.write_text(content)
    claim_and_release(folder, resume=True)
    assert len(RunFolder(folder.root).run_id) == 12 and read_run_id(folder.lock) is not None


NAMESPACE = """
mount -t tmpfs tmpfs "$2" && exec "$0" -c "$1" "$2"
"""

CLAIM_HERE = """
import sys
from pathlib import Path
from ycore.run.claim import Claim
from ycore.run.files import RunFolder
folder = RunFolder(Path(sys.argv[1]) / "run")
folder.root.mkdir()
Claim(folder)
print(folder.run_id)
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"
)
def test_one_path_in_two_mount_namespaces_has_two_ids(tmp_path: Path) -> None:
    command = [
        "unshare",
        "-m",
        "sh",
        "-c",
        NAMESPACE,
        sys.executable,
        CLAIM_HERE,
        str(tmp_path),
    ]
    ids = [
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout
        for _ in range(2)
    ]
    assert len(set(ids)) == 2 and all(len(line) == 13 for line in ids)


def test_a_link_in_place_of_a_private_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunFolderError, match="is a link"):
        make_private(tmp_path / "link")


def test_secrets_are_not_written(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    canary = "hf_" + "q7" * 12
    command = [
        "ycore",
        "grpo",
        "--hub-token",
        "plain-1",
        "--set",
        "trl.hub_token=plain-2",
        f"--x={canary}",
    ]
    monkeypatch.setattr(sys, "argv", command)
    claim_and_release(
        folder, trl={"hub_token": "plain-3"}, dataset="https://me:plain-4@example.org/d.jsonl"
    )
    text = folder.config.read_text()
    assert canary not in text
    assert "plain-" not in text
    assert "example.org/d.jsonl" in text
    check_claim(
        folder,
        config_for(folder, trl={"hub_token": "x"}, dataset="https://me:y@example.org/d.jsonl"),
        resume=AS_IT_WAS,
    )


def test_what_may_change_is_what_there_is() -> None:
    names = {*RunConfig.model_fields}
    names |= {f"engine.{name}" for name in EngineSettings.model_fields}
    names |= {f"reward_workers.{name}" for name in RewardSettings.model_fields}
    names |= {f"turns.{name}" for name in TurnSettings.model_fields}
    names |= {f"sandbox.{name}" for name in SandboxSettings.model_fields}
    assert names >= FREE
    assert {*fields_of("GRPOConfig")} >= FREE_OF_TRL


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ({"seed": 0}, {"seed": 1}, "seed: 0 there, 1 here"),
        ({"trl": {"beta": 0.1}}, {"trl": {}}, "trl.beta: 0.1 there, None here"),
        ({"lora": {"r": 16}}, {"lora": None}, "lora.r: 16 there, None here"),
        (
            {"rewards": [{"weight": 1}]},
            {"rewards": [{"weight": 2}]},
            "rewards.0.weight: 1 there, 2 here",
        ),
        ({"steps": 9}, {"steps": 8}, "steps: 9 there, 8 here"),
        ({"steps": 9}, {"steps": 10}, ""),
        ({"engine": {"count": 1}}, {"engine": {"count": 2}}, ""),
        ({"trl": {"report_to": "wandb"}}, {"trl": {}}, ""),
        ({}, {"eval_dataset": "a", "eval_rewards": ["length"], "eval_every": 2}, ""),
        ({"eval_dataset": "a"}, {"eval_dataset": "b"}, "eval_dataset: 'a' there, 'b' here"),
        (
            {"eval_dataset": "a"},
            {"eval_dataset": "a", "eval_rewards": ["length"]},
            "eval_rewards: None there, ['length'] here",
        ),
        ({"eval_dataset": "a"}, {}, ""),
        ({"held_out": 0}, {"held_out": 0, "eval_split": "test"}, ""),
        (
            {"held_out": None},
            {"held_out": None, "eval_split": "test"},
            "eval_split: None there",
        ),
        (
            {"mixture": [{"eval_dataset": "a"}], "eval_limit": 5},
            {"mixture": [{"eval_dataset": "a"}], "eval_limit": 6},
            "eval_limit: 5 there, 6 here",
        ),
        ({"eval_rewards": []}, {"eval_rewards": ["j"]}, ""),
        (
            {"algorithm": "flow", "eval_rewards": ["i"]},
            {"algorithm": "flow", "eval_rewards": ["j"]},
            "eval_rewards.0: 'i' there, 'j' here",
        ),
    ],
)
def test_differences_are_named(
    old: dict[str, object], new: dict[str, object], said: str
) -> None:
    sentence = in_words(settings_that_differ(old, new))
    assert sentence.startswith(said) if said else sentence == ""


def test_a_long_difference_is_short_and_names_the_key_that_differs() -> None:
    long = [{"reward": "a" * 100, "weight": 1.0, "args": {"file": "b" * 300}}]
    changed = [{"reward": "a" * 100, "weight": 2.0, "args": {"file": "c" * 300}}]
    sentence = in_words(settings_that_differ({"rewards": long}, {"rewards": changed}))
    assert "rewards.0.weight: 1.0 there, 2.0 here" in sentence
    assert "rewards.0.args.file: 'bbb" in sentence and len(sentence) < 250


def test_many_differences_are_counted() -> None:
    differences = settings_that_differ({}, dict.fromkeys("abcde", 1))
    assert (
        in_words(differences)
        == "a: None there, 1 here; b: None there, 1 here; c: None there, 1 here; and 2 more"
    )


def test_a_model_is_known_by_its_content(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(1000))
    (tmp_path / "README.md").write_text("one")
    first = model_fingerprint(tmp_path)
    assert (
        first == "1000 bytes, sha256 d00a61415de420f9"
    )  # as identity.json of earlier runs has it
    (tmp_path / "README.md").write_text("two")
    assert model_fingerprint(tmp_path) == first
    weights.write_bytes(bytes(999) + b"x")
    assert model_fingerprint(tmp_path) != first
    (difference,) = contents_that_differ(
        {"model": first}, {"model": model_fingerprint(tmp_path)}
    )
    assert str(difference).startswith("model: '1000 bytes, sha256 ")


def test_a_large_file_is_known_by_blocks_over_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ycore.run.claim._WHOLE_BYTES", 100)
    monkeypatch.setattr("ycore.run.claim._BLOCK_BYTES", 8)
    file = tmp_path / "weights"
    file.write_bytes(bytes(10_000))
    first = files_fingerprint([file])
    for place in (0, 9_999):
        data = bytearray(10_000)
        data[place] = 1
        file.write_bytes(data)
        assert files_fingerprint([file]) != first


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl"])
def test_a_folder_in_a_files_place_is_one_line(name: str, folder: RunFolder) -> None:
    (folder.root / name).mkdir(parents=True)
    with pytest.raises(RunFolderError, match=f"{name} must be a file; remove it, or choose"):
        claim(folder, config_for(folder), resume=False)


def test_a_name_that_no_disk_takes_is_one_line(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / ("x" * 300))
    with pytest.raises(
        RunFolderError, match=r"--output .* cannot be used \(File name too long: "
    ):
        check_claim(folder, config_for(folder), resume=None)
