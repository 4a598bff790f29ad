import os
from pathlib import Path

import pytest

from ycore.errors import ConfigError
from ycore.sandbox import Level, level
from ycore.sandbox.canaries import HONEST, MEMORY
from ycore.sandbox.level import (
    LevelChoice,
    choose_level,
    defect,
    level_refusal,
    remedy_for,
    require_sandbox,
    self_test,
)

ATTEMPTED = [HONEST, "a file of the user", MEMORY]
NO_NAMESPACES = "bwrap: Creating new namespace failed: Operation not permitted"


def test_a_level_holds_when_honest_work_runs_and_nothing_got_through() -> None:
    assert (
        defect({HONEST: True, "a file of the user": False, MEMORY: False}, ATTEMPTED, "")
        is None
    )
    assert (
        defect({HONEST: True, "a file of the user": False}, ATTEMPTED, "") is None
    )  # the attempt on memory ended it


def test_a_level_is_refused_on_any_doubt() -> None:
    assert defect({}, ATTEMPTED, f"warning\n{NO_NAMESPACES}\n") == NO_NAMESPACES
    assert defect({HONEST: False}, ATTEMPTED, "") == "no answer"
    assert (
        defect({HONEST: True, "a file of the user": True}, ATTEMPTED, "")
        == "reached from inside: a file of the user"
    )
    assert (
        defect({HONEST: True}, ATTEMPTED, "") == "ended before it could try a file of the user"
    )


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict:
    refusals: dict[Level, str | None] = {}
    monkeypatch.setattr(
        level, "level_refusal", lambda sandbox_level: refusals.get(sandbox_level)
    )
    return refusals


def test_auto_takes_the_strongest_and_says_what_was_tried(answers: dict) -> None:
    assert choose_level("auto") == LevelChoice(Level.NAMESPACES, {})
    assert choose_level("auto").line == "namespaces"
    answers[Level.NAMESPACES] = NO_NAMESPACES
    choice = choose_level("auto")
    assert choice.level is Level.LANDLOCK
    assert (
        choice.line.startswith("landlock, the weaker level: ") and NO_NAMESPACES in choice.line
    )
    assert "--security-opt" in choice.line
    answers[Level.LANDLOCK] = "the kernel has no Landlock"
    choice = choose_level("auto")
    assert choice.level is Level.NONE
    assert (
        "your own code needs --sandbox none" in choice.line
        and "the kernel has no Landlock" in choice.line
        and "\n" not in choice.line
    )


def test_no_answer_is_no_reason_for_a_weaker_level(answers: dict) -> None:
    answers[Level.NAMESPACES] = "no answer"
    with pytest.raises(ConfigError, match=r"level namespaces gave no answer in 3 .*--sandbox"):
        choose_level("auto")
    answers[Level.NAMESPACES] = NO_NAMESPACES
    answers[Level.LANDLOCK] = "fork: Resource temporarily unavailable"
    with pytest.raises(ConfigError, match=r"landlock gave no answer .*unavailable.*ulimit -u"):
        choose_level("auto")


@pytest.mark.parametrize(
    ("replies", "answer", "num_tries"),
    [
        (["no answer", BlockingIOError(11, "Resource temporarily unavailable"), None], None, 3),
        (["no answer"] * 4, "no answer", 3),
        ([NO_NAMESPACES, None], NO_NAMESPACES, 1),
    ],
)
def test_a_busy_machine_is_asked_again(
    replies: list, answer: str | None, num_tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Level] = []

    def answer_next(sandbox_level: Level) -> str | None:
        tried.append(sandbox_level)
        reply = replies[len(tried) - 1]
        if isinstance(reply, OSError):
            raise reply
        return reply

    monkeypatch.setattr(level, "self_test", answer_next)
    monkeypatch.setattr(level, "landlock_refusal", lambda: None)
    assert level_refusal.__wrapped__(Level.LANDLOCK) == answer and len(tried) == num_tries


def test_a_level_asked_for_by_name_is_never_replaced(answers: dict) -> None:
    answers[Level.NAMESPACES] = NO_NAMESPACES
    with pytest.raises(
        ConfigError, match=r"cannot be had at level namespaces: bwrap: .*--security-opt"
    ):
        choose_level("namespaces")
    assert choose_level("landlock").level is Level.LANDLOCK
    assert choose_level("none").line == "none, as was asked for"


def test_a_models_programs_never_fall_to_none_by_themselves(answers: dict) -> None:
    answers |= {Level.NAMESPACES: NO_NAMESPACES, Level.LANDLOCK: "the kernel has no Landlock"}
    with pytest.raises(
        ConfigError, match="the code reward needs a sandbox, and there is none here"
    ):
        require_sandbox(choose_level("auto"), "the code reward")
    assert require_sandbox(choose_level("none"), "the code reward") is Level.NONE


def test_the_way_out_fits_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert remedy_for("no bwrap is installed").startswith("`apt install bubblewrap`")
    assert "AppArmor" in remedy_for("bwrap: setting up uid map: Permission denied")
    assert "AppArmor" in remedy_for(
        "bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted"
    )
    monkeypatch.setattr(level, "_RESTRICTED", level.Path("/nowhere"))
    assert "--security-opt seccomp=unconfined" in remedy_for(NO_NAMESPACES)


REAL = [
    sandbox_level
    for sandbox_level in (Level.NAMESPACES, Level.LANDLOCK)
    if level_refusal(sandbox_level) is None
]


def test_this_machine_offers_a_level() -> None:
    assert REAL, {
        sandbox_level: level_refusal(sandbox_level)
        for sandbox_level in (Level.NAMESPACES, Level.LANDLOCK)
    }
    assert choose_level("auto").level is REAL[0]


@pytest.mark.parametrize("sandbox_level", REAL)
def test_an_inherited_environment_is_found(
    sandbox_level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    confined_launch = level.confined_launch

    def leaky(*arguments, **keywords):
        launch = confined_launch(*arguments, **keywords)
        return launch._replace(environment={**os.environ, **launch.environment})

    monkeypatch.setattr(level, "confined_launch", leaky)
    answer = self_test(sandbox_level)
    assert answer is not None and answer.startswith(
        "reached from inside: a variable of the environment"
    )


@pytest.mark.skipif(Level.NAMESPACES not in REAL, reason="no namespaces here")
def test_an_open_tree_of_files_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    confined_launch = level.confined_launch

    def leaky(*arguments, **keywords):
        launch = confined_launch(*arguments, **keywords)
        at = launch.command.index("--chdir")
        wide = [
            part for name in ("/etc", "/home", "/var") for part in ("--ro-bind-try", name, name)
        ]
        return launch._replace(command=[*launch.command[:at], *wide, *launch.command[at:]])

    monkeypatch.setattr(level, "confined_launch", leaky)
    answer = self_test(Level.NAMESPACES)
    assert answer is not None and "a file of the user" in answer and "a socket file" in answer


@pytest.mark.parametrize("sandbox_level", REAL)
def test_a_sandbox_in_which_python_cannot_start_is_refused(
    sandbox_level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    confined_launch = level.confined_launch
    monkeypatch.setattr(
        level,
        "confined_launch",
        lambda module, *a, **k: confined_launch("no.such.module", *a, **k),
    )
    answer = self_test(sandbox_level)
    assert answer is not None and "No module named" in answer


@pytest.mark.parametrize("sandbox_level", REAL)
def test_a_machine_whose_system_calls_are_not_known_is_named(
    sandbox_level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    answer = level_refusal.__wrapped__(sandbox_level)
    assert (
        answer is not None
        and answer.startswith("the filter of system calls knows")
        and "riscv64" in answer
    )
