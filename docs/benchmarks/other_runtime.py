"""Ask a trained model questions at temperature 0 by transformers and by llama.cpp, and count the equal answers.

    ycore export runs/quickstart --format merged --output models/sums
    ycore export runs/quickstart --format gguf --output models/sums.gguf
    python docs/benchmarks/other_runtime.py models/sums models/sums.gguf --dataset 'task:addition?digits=1'

The questions are the test rows of the dataset, 20 unless `--limit` says otherwise. llama.cpp is that of the package
xllamacpp, and answers by its own chat endpoint: its template, its tokenizer and its arithmetic, on the file's bfloat16.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import xllamacpp
from transformers import AutoModelForCausalLM, AutoTokenizer

from ycore.config.schema import RewardConfig, RunConfig
from ycore.data.prompts import load_prompts


def by_transformers(
    folder: Path, chats: list[list[dict[str, str]]], num_tokens: int
) -> list[str]:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for chat in chats:
        ids = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        written = model.generate(**ids, max_new_tokens=num_tokens, do_sample=False)
        answers.append(
            tokenizer.decode(written[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        )
    return answers


def by_llama_cpp(file: Path, chats: list[list[dict[str, str]]], num_tokens: int) -> list[str]:
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup, params.n_parallel = (
        str(file),
        1024,
        False,
        1,
    )
    server = xllamacpp.Server(params)
    sampling = {"max_tokens": num_tokens, "temperature": 0.0, "cache_prompt": False}
    answers = [server.handle_chat_completions({"messages": chat, **sampling}) for chat in chats]
    return [answer["choices"][0]["message"]["content"] for answer in answers]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--dataset", default="task:addition?digits=1")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=24)
    arguments = parser.parse_args()
    config = RunConfig(
        model=str(arguments.folder), dataset=arguments.dataset, rewards=[RewardConfig(reward="length")], output="none",
        split="test", limit=arguments.limit,
    )  # fmt: skip
    chats: list[Any] = [prompt.content for prompt in load_prompts(config, as_chat=True).prompts]
    ours, theirs = (
        by_transformers(arguments.folder, chats, arguments.tokens),
        by_llama_cpp(arguments.file, chats, arguments.tokens),
    )
    pairs = list(zip(ours, theirs, strict=True))
    for chat, (our_answer, their_answer) in zip(chats, pairs, strict=True):
        if our_answer != their_answer:
            print(
                f"{chat[-1]['content']!r}: {our_answer!r} by transformers, {their_answer!r} by llama.cpp"
            )
    print(
        f"{sum(our_answer == their_answer for our_answer, their_answer in pairs)} of {len(pairs)} answers are equal"
    )


if __name__ == "__main__":
    main()
