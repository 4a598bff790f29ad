"""`flow-digits` is made in a child process, whose end is a line."""

from pathlib import Path

import pytest

from ycore.errors import ModelError
from ycore.flow.flow_folder import fetch_flow_model


def test_digits_that_take_too_long_to_make_are_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("YCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("ycore.flow.flow_folder._MAKE_WITHIN_S", 0)
    with pytest.raises(
        ModelError,
        match=r"making flow-digits took more than 0 s; .* its output is in .*model.log",
    ):
        fetch_flow_model("flow-digits", log=tmp_path / "model.log")
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []
