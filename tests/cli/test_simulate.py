"""`ycore simulate`: a table, one JSON object, a picture, and lines that say what is wrong."""

import json
from pathlib import Path

import pytest
from ycore_cli.main import run

from ycore.run.trace import ROUND, Span, TraceWriter

SMALL = [
    "simulate",
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
    assert all(words in out for words in ("dynamic", "colocated", "split:1:1", "use --placement"))
    assert (tmp_path / "lanes.png").read_bytes().startswith(b"\x89PNG")


def test_json_is_one_object(capfd: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--judge-work", "2", "--swap-s", "1.4", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert {row["placement"] for row in told["placements"]} == {"dynamic", "colocated", "split:1:1"}
    assert all(row["round_s"] > 0 and row["bound_ratio"] >= 1 for row in told["placements"])


def test_whole_steps_are_played_with_what_shortens_their_tails(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run([*SMALL, "--judge-work", "0", "--train-s", "5", "--oversample", "2", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)["steps"]
    names = [one["name"] for one in told]
    assert names == ["as it is", "--oversample 2", "apart, in turn", "--max-staleness 1", "both"]
    assert told[3]["seconds"] < told[2]["seconds"] and told[3]["rolling"] == 1
    assert run([*SMALL, "--judge-work", "0", "--train-s", "5", "--drafts", "4:0.8"]) == 0
    shown = capfd.readouterr().out
    assert "apart, in turn" in shown and "engine.drafts=4" in shown
    assert run([*SMALL, "--train-s", "5", "--drafts", "many"]) == 2
    assert "--drafts takes a whole number of 1 or more; it is 'many'" in capfd.readouterr().err


def test_a_run_is_played_again(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.json")
    for step in range(2):
        begin = 100.0 * step
        writer.add(Span(ROUND, 0, -1, begin, 50, {"step": step}))
        for number in range(8):
            told = {"request": 20 * step + number, "tokens": 100 + number, "waited_s": 0}
            writer.add(Span("rollout", 0, 0, begin, 10 + number, told))
            judged = {"request": 20 * step + 10 + number, "tokens": 0, "waited_s": 0}
            writer.add(Span("judge", 0, 1, begin + 10 + number, 3, judged))
    writer.flush()
    assert run([*SMALL, "--trace", str(tmp_path), "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["recorded_s"] == pytest.approx(20)
    seconds = {row["placement"]: row["round_s"] for row in told["placements"]}
    assert seconds["split:1:1"] == pytest.approx(20, rel=0.15)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--slots", "2.5"], "--slots takes a whole number"),
        (["--judge-work", "-1"], "--judge-work takes a number"),
        (["--step-time", "fast"], "--step-time takes a number"),
        (["--trace", "nowhere"], "no trace in nowhere"),
        (["nothing"], "no recipe 'nothing'"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", *arguments]) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ") and said in err and err.count("\n") == 1
