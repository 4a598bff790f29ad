"""`ycore dpo`: direct preference optimization. Not here: its options and what it does with them (`tune`)."""

from ycore_cli.tune import tuning_command

dpo = tuning_command(
    "dpo",
    """Train a model on pairs of answers, the better one known, without a reward model.

    \b
    Columns: chosen and rejected, with or without prompt. Dialogues written as one text,
    Human: ... Assistant: ..., are taken apart.
    Any field of TRL's DPOConfig is an option too, e.g. --loss-type ipo, --beta 0.05.

    \b
    ycore dpo --recipe hh-dpo
    ycore dpo --model runs/sft/model --dataset pairs.jsonl --output runs/dpo
    """,
)
