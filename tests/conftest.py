"""Fixtures and settings that every test can count on."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Tests that run under nohup, or in the background of a script, would hand their ignored signals on to every process
# that they start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Processes that tests start find the scripted engine (tests.chaos), wherever they work.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)
# How long a command takes depends on the machine, and with it whether it says meanwhile that it goes on.
os.environ["YCORE_PROGRESS"] = "off"
# How long an example takes to draw, or to run, depends on the machine too.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random model of a hundred thousand parameters with a chat template. Tests only read its folder."""
    from tests.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("chat-model"))


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the same model without a chat template. Tests only read it."""
    from tests.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("text-model"), chat=False)
