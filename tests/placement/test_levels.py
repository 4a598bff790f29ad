"""How deep a frozen model sleeps follows from what was measured."""

from ycore.placement.learning import DROP, KEEP, SleepLevels


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
