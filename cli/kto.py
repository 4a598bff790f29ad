"""`ycore kto`: learning from good and bad answers. Not here: its options and what it does with them (`tune`)."""

from ycore_cli.tune import tuning_command

kto = tuning_command(
    "kto",
    """Train a model on answers that are good or bad, each for itself.

    \b
    Columns: prompt, completion and label (true or false); or those of pairs, which are split in two.
    Any field of TRL's KTOConfig is an option too, e.g. --undesirable-weight 1.5.

    \b
    ycore kto --model smollm2-135m --dataset labelled.jsonl --output runs/kto
    ycore kto --model runs/sft/model --dataset pairs.jsonl --dry-run
    """,
)
