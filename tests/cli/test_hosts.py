"""`--hosts` with a stand-in for ssh that runs the command here; tests/distributed/test_hosts.py has a real one."""

import os
import signal
import sys
from pathlib import Path

import pytest
from ycore_cli import hosts
from ycore_cli.hosts import Host, run_on_hosts

from ycore import __version__
from ycore.errors import ConfigError

SSH = """#!/bin/bash
host="${@: -2:1}"
command="${@: -1}"
export SSH_CONNECTION="10.0.0.9 5 $ADDRESS 22"
echo "Welcome to $host"
case $host in
    gone) echo "ssh: connect to host gone port 22: Connection refused" >&2; exit 255;;
    bare) command="${command/cd /cd /nowhere}";;
    old) export OLD=1;;
    stopped) command="($command); until [ -e '$0.ended' ]; do sleep 0.05; done; exit 130";;
    frozen) command="($command); exec sleep 60";;
    failing) command="($command); touch '$0.ended'; exit 1";;
    a) command="($command); status=\\$?; touch '$0.ended'; exit \\$status";;
esac
exec sh -c "$command"
"""
SITE = "import os\nif 'OLD' in os.environ:\n    import ycore\n    ycore.__version__ = '0.0.1'\n"


@pytest.fixture(autouse=True)
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(SITE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("ADDRESS", "10.0.0.1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)


def test_the_first_host_shows_its_output(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_on_hosts(["a", "b"], ["--version"]) == 0
    assert capfd.readouterr().out == f"ycore {__version__}\n"


def test_an_error_that_two_hosts_share_is_said_with_one_status(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run_on_hosts(["a", "b"], ["docs", "zzz"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and "error: no page has 'zzz'" in err


@pytest.mark.parametrize(
    ("second", "words", "status"),
    [("a", "--version", 130), ("failing", "--version", 1), ("a", "docs zzz", 2)],
)
def test_a_failure_is_told_from_the_stop_that_it_causes(
    second: str, words: str, status: int
) -> None:
    """The first host, which is stopped because another has failed, made the whole command an interrupted one."""
    assert run_on_hosts(["stopped", second], words.split()) == status


@pytest.mark.parametrize(
    ("typed", "resumed"),
    [
        ("grpo --output resume", "grpo --output resume --resume"),
        ("grpo --resume --steps 4", "grpo --resume --steps 4"),
        ("resume runs/a --resume-from 40 --steps 9", "resume runs/a --steps 9"),
        ("resume runs/a --resume_from=40 --accept-changes", "resume runs/a"),
    ],
)
def test_a_host_that_comes_back_sets_no_step_aside(typed: str, resumed: str) -> None:
    assert hosts._resumed(typed.split()) == resumed.split()


def test_a_third_ctrl_c_leaves_a_host_that_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send = Host.send

    def press_ctrl_c(host: Host, orders: bytes) -> None:
        send(host, orders)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Host, "send", press_ctrl_c)
    assert run_on_hosts(["frozen"], ["--version"]) == 1


def test_each_host_that_cannot_run_is_a_line(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as last:
        run_on_hosts(["gone", "bare", "a", "old"], ["--version"])
    out, err = capfd.readouterr()
    gone, bare, old = [*err.splitlines(), str(last.value)]
    needs = f"it needs ycore {__version__} at {sys.executable}, and the folder {tmp_path}"
    refused = "ssh: connect to host gone port 22: Connection refused"
    way_out = "it needs an answer to `ssh gone` without a question"
    assert gone == f"error: host gone cannot start: {refused}; {way_out}"
    assert bare.startswith("error: host bare cannot start: ") and bare.endswith(needs)
    assert "nowhere" in bare
    assert old == f"host old has ycore 0.0.1; {needs}"
    assert out == "", "nothing started"


def test_hosts_do_not_meet_at_an_address_of_one_machine(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADDRESS", "127.0.1.1")
    with pytest.raises(
        ConfigError, match=r"host a is 127\.0\.1\.1 here.*name it by an address"
    ):
        run_on_hosts(["a", "b"], ["--version"])
    assert run_on_hosts(["a"], ["--version"]) == 0
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert run_on_hosts(["a", "b"], ["--version"]) == 0


def test_without_ssh_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"no ssh here; install it"):
        run_on_hosts(["a"], ["--version"])
