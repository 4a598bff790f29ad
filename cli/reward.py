"""`ycore reward`: a reward model from preferences. Not here: its options and what it does with them (`tune`)."""

from ycore_cli.tune import tuning_command

reward = tuning_command(
    "reward",
    """Train a reward model on pairs of answers, the better one known.

    \b
    Columns: chosen and rejected, with or without prompt. Dialogues written as one text,
    Human: ... Assistant: ..., are taken apart. The summary has the accuracy on held-out pairs.
    Any field of TRL's RewardConfig is an option too, e.g. --center-rewards-coefficient 0.01.

    \b
    ycore reward --recipe hh-reward
    ycore reward --model smollm2-135m --dataset pairs.jsonl --output runs/rm
    """,
)
