"""What a model, a dataset or a reward wrote is printed as data: no markup is read in it, and no terminal obeys it."""

from pathlib import Path

import pytest
from ycore_cli.output import print_closing, print_table

from ycore.config.schema import RewardConfig, RunConfig
from ycore.run.files import write_json_atomic
from ycore.run.paths import RunFolder


def closing(folder: Path, completion: str, prompt: object = "1 + 1 =") -> None:
    """The closing page of a run whose samples hold this completion."""
    sample = {"prompt": prompt, "completion": completion}
    write_json_atomic(RunFolder(folder).samples, {"before": [sample], "after": [sample]})
    config = RunConfig(
        model="m", dataset="task:addition", rewards=[RewardConfig(reward="exact_answer")], output=str(folder)
    )
    print_closing(config)


@pytest.mark.parametrize(
    ("completion", "shown"),
    [
        ("[/INST] \x1b[31m", r"[/INST] \x1b[31m"),
        ("[bold]x[/bold] :smile:", "[bold]x[/bold] :smile:"),
        ("[link=file:///etc]x", "[link=file:///etc]x"),
        ("a\rb\x07c", r"a\rb\x07c"),
        ("ends in \\", "ends in \\"),
    ],
)
def test_a_completion_is_data(
    completion: str, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    closing(tmp_path, completion)
    out = capsys.readouterr().out
    assert out.count(shown) == 2, "before and after"
    assert not {"\x1b", "\r", "\x07"} & set(out)


def test_a_chats_last_turn_is_its_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    closing(tmp_path, "2", [{"role": "system", "content": "Add."}, {"role": "user", "content": "[b]1 + 1 ="}])
    out = capsys.readouterr().out
    assert "[b]1 + 1 =" in out and "Add." not in out
    assert "ycore eval --model" in out and "--split test" in out


def test_a_table_is_data_too(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([("dataset", "columns \x1b[2J[bold]\n2 rows"), ("\x07", "")])
    assert capsys.readouterr().out == "dataset  columns \\x1b[2J[bold]\\n2 rows\n\\x07\n"
