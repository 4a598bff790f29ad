"""Stop signals, in this process: counted, turned into an error or an exit status, or passed to a callback."""

import os
import signal
from collections.abc import Iterator

import pytest

from ycore.errors import Interrupted
from ycore.run.interrupt import StopRequests, on_stop, run_command


@pytest.fixture(autouse=True)
def _restore_handlers() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def test_stop_requests_are_counted_and_the_old_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopRequests() as stops:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            send(number)
        assert stops.count == 3
    assert signal.getsignal(signal.SIGINT) is before


def test_work_that_cannot_look_is_interrupted_once() -> None:
    with StopRequests() as stops:
        with pytest.raises(Interrupted, match="--resume starts again"), stops.at_once():
            send(signal.SIGINT)
        send(signal.SIGINT)
        assert stops.count == 2


def test_ctrl_c_is_the_status_whatever_it_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    def broken_import() -> int:
        try:
            send(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("half imported") from None
        return 0

    assert run_command(broken_import) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert run_command(lambda: 0) == 0
    assert run_command(lambda: 2) == 2


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: 1 // 0)


def test_a_trainer_is_told_to_stop() -> None:
    calls: list[int] = []
    on_stop(lambda: calls.append(1))
    send(signal.SIGINT)
    send(signal.SIGTERM)
    assert calls == [1, 1]
