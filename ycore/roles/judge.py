"""The judge role's process: one stock vLLM server that answers chats, beside the slot's rollout engine.

Its weights are frozen: nothing ever sends it others. Prefix caching is vLLM's default, which is on, and a judge's
questions begin alike.

Not here: the questions (`ycore.judging`), asking them (`judge_engine`), starting the process (`launch`).
"""

from ycore.roles.judge_engine import SERVED_JUDGE
from ycore.roles.rollout import RolloutEngine, server_command


def judge_command(engine: RolloutEngine) -> list[str]:
    """The server's command line; log-probabilities are the model's own, whatever the temperature."""
    return server_command(engine, served_as=SERVED_JUDGE, options={"--logprobs-mode": "raw_logprobs"})
