from ycore.run.metrics import summarise


def test_rewards_are_means_of_the_first_and_last_five_steps() -> None:
    metrics = [{"step": step, "reward": step / 10} for step in range(1, 13)]
    assert summarise(metrics, "finished", 12.34) == {
        "status": "finished",
        "steps": 12,
        "wall_s": 12.3,
        "reward_first": 0.3,
        "reward_last": 1.0,
    }


def test_a_run_without_steps_has_no_rewards() -> None:
    summary = summarise([], "failed", 1.0, error="no room")
    assert (summary["steps"], summary["reward_first"], summary["reward_last"]) == (0, None, None)
    assert summary["error"] == "no room"


def test_rows_without_a_reward_do_not_count() -> None:
    metrics = [{"step": 1, "reward": 1.0}, {"step": 2, "reward": None}, {"step": 2, "train_loss": 0.1}]
    summary = summarise(metrics, "interrupted", 1.0)
    assert (summary["steps"], summary["reward_last"]) == (2, 1.0)
