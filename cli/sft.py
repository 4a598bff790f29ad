"""`ycore sft`: supervised fine-tuning on given answers. Not here: its options and what it does with them (`tune`)."""

from ycore_cli.tune import tuning_command

sft = tuning_command(
    "sft",
    """Fine-tune a model on given answers.

    \b
    Columns: messages; or prompt and completion (question and answer, instruction and output);
    or text. Any field of TRL's SFTConfig is an option too, e.g. --max-length 2048.

    \b
    ycore sft --recipe sft-chat
    ycore sft --model smollm2-135m --dataset chats.jsonl --output runs/sft
    """,
)
