"""The simulator's command: a table, one JSON object, a picture, and lines that say what is wrong."""

import json
from pathlib import Path

import pytest
from simulate import main as run

from ycore.run.trace import ROUND, Span, TraceWriter

SMALL = [
    "--slots",
    "2",
    "--rounds",
    "2",
    "--prompts-per-step",
    "4",
    "--group-size",
    "4",
]


def test_every_placement_and_which_to_use(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run([*SMALL, "--picture", str(tmp_path / "lanes.png")]) == 0
    out = capfd.readouterr().out
    assert all(
        words in out for words in ("dynamic", "colocated", "split:1:1", "use --placement")
    )
    assert (tmp_path / "lanes.png").read_bytes().startswith(b"\x89PNG")


def test_json_is_one_object(capfd: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--judge-work", "2", "--swap-s", "1.4", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert {row["placement"] for row in report["placements"]} == {
        "dynamic",
        "colocated",
        "split:1:1",
    }
    assert all(row["round_s"] > 0 and row["bound_ratio"] >= 1 for row in report["placements"])


def test_whole_steps_are_played_with_what_shortens_their_tails(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert (
        run([*SMALL, "--judge-work", "0", "--train-s", "5", "--oversample", "2", "--json"]) == 0
    )
    steps = json.loads(capfd.readouterr().out)["steps"]
    names = [step["name"] for step in steps]
    assert names == [
        "as it is",
        "--oversample 2",
        "apart, in turn",
        "--max-staleness 1",
        "both",
        "--max-staleness 4",
    ]
    assert steps[3]["seconds"] < steps[2]["seconds"] and steps[3]["rolling"] == 1
    assert run([*SMALL, "--judge-work", "0", "--train-s", "5", "--drafts", "4:0.8"]) == 0
    output = capfd.readouterr().out
    assert "apart, in turn" in output and "drafts of 4" in output


def test_a_run_is_played_again(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.json")
    for step in range(2):
        begin = 100.0 * step
        writer.add(Span(ROUND, 0, -1, begin, 50, {"step": step}))
        for number in range(8):
            rollout_args = {
                "request": 20 * step + number,
                "tokens": 100 + number,
                "waited_s": 0,
            }
            writer.add(Span("rollout", 0, 0, begin, 10 + number, rollout_args))
            judged = {"request": 20 * step + 10 + number, "tokens": 0, "waited_s": 0}
            writer.add(Span("judge", 0, 1, begin + 10 + number, 3, judged))
    writer.flush()
    assert run([*SMALL, "--trace", str(tmp_path), "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["recorded_s"] == pytest.approx(20)
    seconds = {row["placement"]: row["round_s"] for row in report["placements"]}
    assert seconds["split:1:1"] == pytest.approx(20, rel=0.15)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--trace", "nowhere"], "no trace in nowhere"), (["nothing"], "no recipe 'nothing'")],
)
def test_a_missing_run_or_recipe_is_one_line(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize("arguments", ["--slots 2.5", "--judge-work -1", "--step-time fast"])
def test_a_wrong_number_names_its_option(
    arguments: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(arguments.split())
    assert f"argument {arguments.split()[0]}" in capfd.readouterr().err
