"""Time a bare forward and backward pass, the reference for the trainer: `python bare.py ORDER.json ANSWER.json`.

It has the same model with the adapters that peft makes, on sequences as long as those of a recorded round: sorted by
length, cut into batches with almost no padding, logits for the completions only. It tries batch sizes with and without
autocast, and keeps the fastest. Losses, advantages, old log-probabilities, metrics and the optimizer are left out.
"""

import contextlib
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MAX_PADDING = 0.03


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of one sequence's prompt and completion."""

    prompt: int
    completion: int

    @property
    def total(self) -> int:
        return self.prompt + self.completion


@dataclass(frozen=True, slots=True)
class PassSettings:
    """How many sequences a pass takes, and whether it computes under autocast."""

    batch_size: int
    autocast: bool


def cut(lengths: Sequence[Lengths], *, batch_size: int) -> list[list[Lengths]]:
    """Cut, longest first, into batches of at most `batch_size`, shorter where padding would pass `MAX_PADDING`."""
    batches: list[list[Lengths]] = []
    for sequence in sorted(lengths, key=lambda item: (-item.total, item.prompt)):
        if (
            not batches
            or len(batches[-1]) == batch_size
            or padding([*batches[-1], sequence]) > MAX_PADDING
        ):
            batches.append([])
        batches[-1].append(sequence)
    return batches


def padding(batch: Sequence[Lengths]) -> float:
    """Return the share of a batch's positions that hold no token."""
    width = max(sequence.total for sequence in batch)
    return 1 - sum(sequence.total for sequence in batch) / (width * len(batch))


def choose(
    measure: Callable[[PassSettings], float],
    batch_sizes: Sequence[int],
    *,
    autocasts: Sequence[bool],
) -> dict[PassSettings, float]:
    """Time autocast and none at the middle size, then the other sizes with what was faster; return seconds by settings."""
    middle = sorted(batch_sizes)[len(batch_sizes) // 2]
    seconds = {}
    for autocast in autocasts:
        settings = PassSettings(middle, autocast)
        seconds[settings] = measure(settings)
    fastest = min(seconds, key=lambda settings: seconds[settings])
    for size in batch_sizes:
        if size != middle:
            settings = PassSettings(size, fastest.autocast)
            seconds[settings] = measure(settings)
    return seconds


def main() -> None:
    order = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(time_round(order), indent=2))


def time_round(order: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of the fastest settings, one value a repeat, and the first seconds of all settings."""
    lengths = sequence_lengths(order)
    model = adapted_model(order)

    def measure(settings: PassSettings) -> float:
        batches = [
            tensors(batch, vocabulary=model.config.vocab_size)
            for batch in cut(lengths, batch_size=settings.batch_size)
        ]
        train_on(
            model, batches[:1], autocast=settings.autocast
        )  # warms up what is compiled or cached for a shape
        began = time.perf_counter()
        train_on(model, batches, autocast=settings.autocast)
        return time.perf_counter() - began

    autocasts = (True, False) if order["dtype"] == "bfloat16" else (False,)
    tried = choose(measure, order["batch_sizes"], autocasts=autocasts)
    best = min(tried, key=lambda settings: tried[settings])
    seconds = [tried[best], *(measure(best) for _ in range(order["repeats"] - 1))]
    batches = cut(lengths, batch_size=best.batch_size)
    tokens = sum(sequence.total for sequence in lengths)
    width = sum(len(batch) * max(sequence.total for sequence in batch) for batch in batches)
    return {
        "seconds": seconds,
        "tokens": tokens,
        "num_sequences": len(lengths),
        "padding": 1 - tokens / width,
        **asdict(best),
        "tried": [{**asdict(settings), "seconds": value} for settings, value in tried.items()],
    }


def sequence_lengths(order: dict[str, Any]) -> list[Lengths]:
    """Read the recorded round as lengths; the model's own tokenizer and chat template count the prompts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(order["model"])
    rows = [json.loads(line) for line in Path(order["prompts"]).read_text().splitlines()]
    encoded = [
        tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_dict=True
        )
        for row in rows
    ]
    num_tokens = [len(item["input_ids"]) for item in encoded]
    return [
        Lengths(num_tokens[index], completion) for index, completion in order["completions"]
    ]


def adapted_model(order: dict[str, Any]) -> Any:
    """Load the base model, and put its adapters in place, ready to train."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(order["seed"])
    base = AutoModelForCausalLM.from_pretrained(order["model"], dtype=order["dtype"])
    adapters = LoraConfig(
        r=order["lora_r"],
        lora_alpha=order["lora_alpha"],
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base, adapters).get_base_model().train()


def tensors(batch: Sequence[Lengths], *, vocabulary: int) -> tuple[Any, Any]:
    """Make token ids padded on the right, and a mask of where each completion token is predicted. The ids are random.

    Padding on the right is behind everything, so causal attention needs no mask for it.
    """
    import torch

    draw = random.Random(0)
    width = max(sequence.total for sequence in batch)
    ids = torch.tensor([[draw.randrange(vocabulary) for _ in range(width)] for _ in batch])
    predicts = torch.zeros(ids.shape, dtype=torch.bool)
    for row, sequence in enumerate(batch):
        predicts[row, sequence.prompt - 1 : sequence.total - 1] = True
    return ids, predicts


def train_on(model: Any, batches: Sequence[tuple[Any, Any]], *, autocast: bool) -> None:
    """Run forward and backward of every batch; add up the gradients and then drop them."""
    import torch
    from torch.nn.functional import cross_entropy

    for ids, predicts in batches:
        with (
            torch.autocast("cpu", dtype=torch.bfloat16)
            if autocast
            else contextlib.nullcontext()
        ):
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            logits = model.get_output_embeddings()(hidden[predicts])
            targets = ids[:, 1:][predicts[:, :-1]]
            loss = cross_entropy(logits.float(), targets)
        loss.backward()
    model.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
