"""The report as its reader has it: complete, safe to open, and drawn by a real browser."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from ycore_cli.main import run as ycore

from ycore.errors import RunFolderError
from ycore.round.journal import Journal
from ycore.run.claim import Claim
from ycore.run.files import RunFolder
from ycore.run.metrics import MetricsWriter
from ycore.types import IMAGE_MARK, Completion, Draw, Group, Prompt, Score, Turn
from ycore.view.report import (
    ScoredCompletion,
    chosen,
    make_report,
    read_run,
    render_page,
    report_json,
    write_report,
)

HOSTILE = "<script>document.title = 'taken'</script> & <b>bold</b> \x1b[2J"
CHROMIUM = (
    shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("google-chrome")
)
QUIET = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "first")


def make_run(
    root: Path, *, seconds: float = 10.0, text: str = HOSTILE, num_ranks: int = 1
) -> Path:
    """Write a run's folder as ycore does: twelve steps, one round in the journal."""
    root.mkdir()
    config = {
        "algorithm": "grpo",
        "model": "tiny",
        "dataset": "task:addition",
        "prompts_per_step": 4,
    }
    config["rewards"] = [{"reward": "exact_answer", "weight": 2.0}]
    run_json = {
        "config": config,
        "command": ["ycore", "grpo", "--model", "tiny model"],
        "versions": {"torch": "2.13.0"},
    }
    (root / "run.json").write_text(
        json.dumps({**run_json, "started": "2026-01-01T00:00:00+00:00"})
    )
    (root / "engines.json").write_text(
        json.dumps({"kind": "vllm", "engines": ["rollout-0", "rollout-1"]})
    )
    with closing(MetricsWriter(root / "metrics.jsonl")) as writer:
        for number in range(1, 13):
            writer.write(_step(number, seconds))
    (root / "summary.json").write_text(
        json.dumps(
            {"status": "finished", "wall_s": 130.0, "reward_first": 0.1, "reward_last": 0.9}
        )
    )
    for rank, group in enumerate((_group(text), _group("from the second rank"))[:num_ranks]):
        Journal(root / "journal", rank=rank, world=num_ranks).commit(12, [group], state={})
    return root


def _group(text: str) -> Group:
    prompt = Prompt(0, [{"role": "user", "content": "2 + 2?"}], {"answer": "4"})
    wrote = [
        Completion((1, 2), (-0.5, -0.5), f"{text} {number}", "stop", 1) for number in range(3)
    ]
    scores = [(Score(1.0),), (Score(0.0),), (Score(None, "raised ValueError"),)]
    return Group(Draw(0, prompt, (5, 6)), tuple(wrote), tuple(scores))


def _step(number: int, seconds: float) -> dict[str, Any]:
    parts = {"ycore/time/sync": 0.1, "ycore/time/round": 0.5, "ycore/time/train": 0.3}
    times = {name: share * seconds for name, share in parts.items()}
    return {
        "step": number,
        "reward": number / 12,
        "grad_norm": 1.0,
        "ycore/time/step": seconds,
        **times,
    }


def test_what_a_model_wrote_stays_text(run: Path) -> None:
    page = render_page(make_report([read_run(run)]))
    assert "<script" not in page and "&lt;script&gt;" in page and r"\x1b[2J" in page
    assert "ycore grpo --model &#39;tiny model&#39;" in page


def test_the_page_needs_nothing_else(run: Path) -> None:
    page = render_page(make_report([read_run(run)]))
    addresses = re.findall(r"""(?:src|href)=["']([^"']+)""", page)
    assert all(address.startswith(("#", "data:")) for address in addresses)
    assert "url(http" not in page and "@import" not in page


def test_the_page_is_for_dark_screens_and_for_phones_too(run: Path) -> None:
    page = render_page(make_report([read_run(run)]))
    style = page.partition("<style>")[2].partition("</style>")[0]
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    names = re.findall(r"--(\w+):", light)
    assert "light dark" in light and "(prefers-color-scheme: dark)" in style
    assert re.findall(r"--(\w+):", dark) == names, "each colour has one of its own there"
    rest = re.sub(r":root \{.*?\}|  img \{.*?\}", "", style, flags=re.DOTALL)
    assert not re.findall(r"#[0-9a-f]{3,6}\b", rest), "no other rule has a colour of its own"
    phone = style.partition("(max-width: 640px)")[2]
    assert re.search(r"table \{[^}]*overflow-x: auto", phone), "a wide table moves alone"


def test_the_rewards_of_the_last_round_are_weighted_sums(run: Path) -> None:
    assert [scored.reward for scored in read_run(run).completions] == [2.0, 0.0, None]


def test_a_reward_that_does_not_apply_leaves_the_others(run: Path) -> None:
    """Completions that were trained on stood there as masked."""
    described = json.loads((run / "run.json").read_text())
    described["config"]["rewards"].append({"reward": "format", "weight": 1.0})
    (run / "run.json").write_text(json.dumps(described))
    group = _group("a")
    scores = [(*scores_R, Score(None)) for scores_R in group.scores_GR]
    group = replace(group, scores_GR=tuple(scores))
    Journal(run / "journal", rank=0).commit(13, [group], state={})
    assert [scored.reward for scored in read_run(run).completions] == [2.0, 0.0, None]


def test_the_last_round_is_that_of_the_journal_and_of_every_rank(tmp_path: Path) -> None:
    """The round's file is written by the journal itself."""
    run = make_run(tmp_path / "two", text="7", num_ranks=2)
    written = read_run(run).completions
    assert [scored.completion for scored in written] == [
        *("7 0", "7 1", "7 2"),
        *("from the second rank 0", "from the second rank 1", "from the second rank 2"),
    ]
    assert written[0] == ScoredCompletion("2 + 2?", "7 0", 2.0)
    page = render_page(make_report([read_run(run)]))
    assert "Completions of the last round" in page and "from the second rank 1" in page


def test_a_damaged_round_is_named_and_the_rest_is_shown(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run / "journal" / "round-000012-rank-0.json")
    assert ycore(["report", str(run)]) == 0
    assert "round-000012-rank-0.json is damaged (its sha256" in capsys.readouterr().out
    assert (
        "round-000012-rank-0.json is damaged (its sha256" in (run / "report.html").read_text()
    )


def test_the_turns_of_a_completion_are_told_apart_by_who_wrote_them(run: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    turns = (
        Turn(True, 1, ({"role": "assistant", "content": "let me see", "tool_calls": [call]},)),
        Turn(
            False,
            1,
            ({"role": "tool", "name": "add", "content": "<b>3"},),
            calls=1,
            seconds=0.5,
        ),
        Turn(True, 1, ({"role": "assistant", "content": "three"},)),
    )
    group = replace(
        _group("4"),
        completions=(Completion((1, 2, 3), (-0.5, 0.0, -0.5), "three", "stop", 1, turns),),
    )
    Journal(run / "journal", rank=0).commit(
        12, [replace(group, scores_GR=((Score(1.0),),))], state={}
    )
    page = render_page(make_report([read_run(run)]))
    assert (
        '<pre class="policy"><b>assistant</b> let me see\nadd({&#39;x&#39;: 1})</pre>' in page
    )
    assert (
        '<pre class="world"><b>tool</b> &lt;b&gt;3</pre><pre class="policy"><b>assistant</b> three</pre>'
        in page
    )


def damage(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def test_completions_are_chosen_from_one_end_to_the_other() -> None:
    written = [ScoredCompletion("p", "c", float(number)) for number in range(100)]
    rewards = [scored.reward for scored in chosen([*written, ScoredCompletion("p", "c", None)])]
    assert rewards == [*range(0, 100, 9), None]
    assert [scored.reward for scored in chosen(written[:3])] == [0, 1, 2] and chosen([]) == []


def test_samples_and_versions_are_shown(run: Path) -> None:
    prompt = [{"role": "user", "content": "3 + 3?"}]
    samples = {
        "before": [{"prompt": prompt, "completion": "5"}],
        "after": [{"prompt": prompt, "completion": "<6>"}],
    }
    (run / "samples.json").write_text(json.dumps(samples))
    with closing(MetricsWriter(run / "metrics.jsonl")) as writer:
        writer.write({"step": 13, "reward": 1.0})
    page = render_page(make_report([read_run(run)]))
    for cell in (
        "<pre>3 + 3?</pre>",
        "<pre>5</pre>",
        "<pre>&lt;6&gt;</pre>",
    ):
        assert cell in page
    assert (
        "torch 2.13.0</p>" in page
        and ">13</td>" in page
        and "2 min 10 s" in page
        and "0.1 → 0.9" in page
    )


def test_a_prompt_whose_turns_only_call_tools_has_its_samples(run: Path) -> None:
    turns = [{"role": "assistant", "content": None}, {"role": "tool", "content": "4"}]
    samples = {when: [{"prompt": turns, "completion": "four"}] for when in ("before", "after")}
    (run / "samples.json").write_text(json.dumps(samples))
    recorded = read_run(run)
    assert not recorded.problems and "four" in render_page(make_report([recorded]))


def test_samples_show_the_pictures_of_their_prompts(run: Path) -> None:
    kept = hashlib.sha256(b"a picture").hexdigest()
    (run / "images").mkdir()
    (run / "images" / kept).write_bytes(b"a picture")
    sample = {
        "prompt": [{"role": "user", "content": f"Is {IMAGE_MARK} a cat?"}],
        "images": [kept, "0" * 64],
    }
    samples = {when: [sample | {"completion": "no"}] for when in ("before", "after")}
    (run / "samples.json").write_text(json.dumps(samples))
    page = render_page(make_report([read_run(run)]))
    assert "<pre>Is [picture] a cat?</pre>" in page, "the mark is no letter that a browser has"
    assert (
        page.count('<img class="seen"') == 1 and base64.b64encode(b"a picture").decode() in page
    )
    (run / "samples.json").write_text(json.dumps(samples).replace(kept, "../run.json"))
    assert "Is [picture]" not in render_page(make_report([read_run(run)])), (
        "only names of pictures are read"
    )


def test_a_run_that_is_still_going_has_a_report(run: Path) -> None:
    for name in ("summary.json", "samples.json"):
        (run / name).unlink(missing_ok=True)
    damage(run / "journal" / "round-000012-rank-0.json")
    report = make_report([read_run(run)])
    page, (stopped,) = render_page(report), report_json([read_run(run)])["runs"]
    assert "killed" in page and stopped["status"] == "killed"
    running = Claim(RunFolder(run))
    try:
        assert report_json([read_run(run)])["runs"][0]["status"] == "running"
    finally:
        running.release()


def test_several_runs_side_by_side(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, page = make_run(tmp_path / "second", seconds=20.0), tmp_path / "both.html"
    assert ycore(["report", str(run), str(other), "--output", str(page), "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert runs[0]["device_seconds_per_informative_group"] == pytest.approx(5.0)
    assert "One run a setting" in page.read_text()


def test_a_folder_of_runs_names_them(run: Path) -> None:
    """It may be a pipeline's, or hold the evaluations of several models."""
    with pytest.raises(RunFolderError, match=f"name one of those in it, {run.name}"):
        read_run(run.parent)


@pytest.mark.parametrize("problem", ["no run.json", "no step"])
def test_what_is_no_run_is_refused(
    problem: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / ("run.json" if problem == "no run.json" else "metrics.jsonl")).unlink()
    assert ycore(["report", str(run)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_curves_turn_dark_with_the_page_and_keep_the_colours_of_their_runs(
    run: Path,
) -> None:
    page = render_page(make_report([read_run(run)]))
    style = page.partition("<style>")[2].partition("</style>")[0]
    dark = style.rpartition("(prefers-color-scheme: dark)")[2]
    rules = re.findall(r"([^{}\n]+) \{ ([^}]*) \}", dark)
    of_curves = " ".join(text for names, text in rules if "svg" in names.strip().split(", "))
    of_keys = " ".join(text for names, text in rules if ".key" in names.strip().split(", "))
    assert "background" not in of_curves and "screen" in of_curves, "black is the page's own"
    assert "invert(1) hue-rotate(180deg)" in of_curves and of_keys and of_keys in of_curves


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize(("scheme", "is_dark"), [(0, True), (1, False)])
def test_a_browser_draws_the_curves_on_the_pages_paper(
    run: Path, tmp_path: Path, scheme: int, is_dark: bool, width: int
) -> None:
    page = write_report(make_report([read_run(run)]), tmp_path / "report.html")
    picture = tmp_path / "page.png"
    command = [
        str(CHROMIUM),
        *QUIET.split(),
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--blink-settings=preferredColorScheme={scheme}",
        f"--window-size={width},900",
        f"--screenshot={picture}",
        page.as_uri(),
    ]
    subprocess.run(command, capture_output=True, timeout=400, check=True)
    shades = Image.open(picture).convert("L").histogram()
    paper = sum(shades[:64]) if is_dark else sum(shades[192:])
    assert paper > 0.8 * sum(shades)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_browser_draws_it(run: Path, tmp_path: Path) -> None:
    """The page as Chromium has it once scripts would have run: hostile text did nothing, every picture has a size."""
    page = write_report(make_report([read_run(run)]), tmp_path / "report.html")
    command = [
        str(CHROMIUM),
        *QUIET.split(),
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
        page.as_uri(),
    ]
    drawn = subprocess.run(
        command, capture_output=True, text=True, timeout=400, check=True
    ).stdout
    assert "<title>first</title>" in drawn and '<h2 id="spent">' in drawn
    assert drawn.count("<svg") == 1 and "<b>bold" not in drawn
