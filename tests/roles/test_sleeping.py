"""Sleep and wake against a scripted server: which calls, in which order. No GPU, so no real sleep."""

import asyncio

from ycore.placement.levels import DROP, KEEP, SleepLevels
from ycore.roles.sleeping import SleepingEngine


class ScriptedServer:
    """Writes down what it is asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def ask(self, method: str, path: str, body: None = None) -> object:
        self.calls.append(f"{method} {path}")
        return None

    async def reload(self) -> None:
        self.calls.append("reload")


def test_a_policy_is_dropped_and_loaded_before_the_cache() -> None:
    server = ScriptedServer()

    async def work() -> None:
        engine = SleepingEngine(server, reload=server.reload)
        await engine.sleep()
        await engine.wake()

    asyncio.run(work())
    assert server.calls == [
        "POST /sleep?level=2",
        "POST /wake_up?tags=weights",
        "reload",
        "POST /wake_up?tags=kv_cache",
    ]


def test_a_frozen_model_tries_both_levels_and_keeps_the_cheaper() -> None:
    levels = SleepLevels()
    assert levels.choose() == KEEP
    levels.observe(KEEP, 12.8)
    assert levels.choose() == DROP
    levels.observe(DROP, 6.8)
    assert levels.choose() == DROP
    for _ in range(5):
        levels.observe(DROP, 20.0)
    assert levels.choose() == KEEP


def test_kept_weights_are_not_loaded_again() -> None:
    server, levels = ScriptedServer(), SleepLevels()

    async def work() -> None:
        engine = SleepingEngine(server, reload=server.reload, levels=levels)
        await engine.sleep()
        await engine.wake()

    asyncio.run(work())
    assert server.calls == ["POST /sleep?level=1", "POST /wake_up?tags=weights", "POST /wake_up?tags=kv_cache"]
    assert levels.seconds[KEEP].value is not None
