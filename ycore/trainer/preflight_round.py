"""The preflight role: `python -m ycore.trainer.preflight_round RUN_FOLDER`, one process.

One small round with the run's own engines, prompts and rewards, before any training: how many completions are cut off,
how many groups can teach, how far engine and trainer are apart, and whether changed weights reach the engine. Leaves
`preflight.json` in the run folder.

Whether a tokenizer's chat template can be its model's own: what it writes, in tokens that the model knows.

Not here: starting engines (`launch`), and what the figures mean (`planning.preflight`).
"""

import re
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ycore.plan.preflight_verdict import NUM_PROMPTS, JudgeCount, Measurements, PromptCount, TemplateCheck
from ycore.round.sampling import total_reward
from ycore.run.reports import on_stop, run_alone
from ycore.types import Completion, Group, Message, Prompt

_MARKER = re.compile(r"<\|[^|<>\s]{1,40}\|>|\[/?INST\]|<(?:start|end)_of_turn>|<\|(?:im_start|im_end)\|>")
_ANSWER = "yes"


def check_template(tokenizer: Any, messages: Sequence[Message], *, ends: Collection[int]) -> TemplateCheck:
    """What is wrong with the tokenizer's chat template, on one prompt of the dataset.

    Args:
        messages: a prompt that ends with the user's turn.
        ends: ids of the tokens that end a completion.
    """
    asked = _written(tokenizer, messages, add_generation_prompt=True)
    plain = _written(tokenizer, messages, add_generation_prompt=False)
    problems = [
        *_foreign_markers(tokenizer, asked),
        *_lost_words(messages, asked),
        *(["nothing in it says that the assistant's turn begins"] if asked == plain else []),
        *_unknown_tokens(tokenizer, asked),
    ]
    return TemplateCheck(tuple(problems), _end_of_turn(tokenizer, messages, ends=ends))


def _written(tokenizer: Any, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    return str(
        tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt)
    )


def _foreign_markers(tokenizer: Any, text: str) -> list[str]:
    """Markers that another family's tokenizer has as one token and this one cuts in pieces."""
    markers = sorted(set(_MARKER.findall(text)))
    pieces = {marker: tokenizer.encode(marker, add_special_tokens=False) for marker in markers}
    unknown = [marker for marker, ids in pieces.items() if len(ids) != 1 or ids[0] == tokenizer.unk_token_id]
    return [f"it writes {', '.join(unknown)}, which this tokenizer does not have as a token"] if unknown else []


def _lost_words(messages: Sequence[Message], text: str) -> list[str]:
    lost = [turn["role"] for turn in messages if turn["content"].strip() and turn["content"].strip() not in text]
    return [f"what the {lost[-1]} says is not in what it writes"] if lost else []


def _unknown_tokens(tokenizer: Any, text: str) -> list[str]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    unknown = sum(token == tokenizer.unk_token_id for token in ids) if tokenizer.unk_token_id is not None else 0
    # A few are a rare letter of the prompt; many are a template of another vocabulary.
    return [f"{unknown} of its {len(ids)} tokens are unknown to the model"] if unknown > 0.2 * len(ids) else []


def _end_of_turn(tokenizer: Any, messages: Sequence[Message], *, ends: Collection[int]) -> str | None:
    """The first token after an answer, where it is special and does not end a completion."""
    answered = _written(tokenizer, [*messages, {"role": "assistant", "content": _ANSWER}], add_generation_prompt=False)
    _, found, after = answered.rpartition(_ANSWER)
    ids = tokenizer.encode(after, add_special_tokens=False) if found and after else []
    if not ids or ids[0] in ends or ids[0] not in tokenizer.all_special_ids:
        return None
    return str(tokenizer.convert_ids_to_tokens(ids[0]))


RESULT = "preflight.json"

_SYNC_PROMPTS = 2
_SCORED = 16  # completions whose log-probabilities are computed again, each in a pass of its own
_SHARPER = 2.0  # by what the last norm is multiplied: every logit is, so every log-probability moves
_SAMPLES = 4


def main() -> int:
    """Exit status: 0 measured, 2 the user's mistake, 130 interrupted, 1 anything else."""
    return run_alone("ycore.trainer.preflight_round", _preflight)


def _preflight(root: Path) -> None:
    from ycore.round.assemble import assemble
    from ycore.run.files import write_json_atomic

    flight = Preflight(assemble(root))

    on_stop(flight.stop)
    try:
        measured, samples = flight.measure()
    finally:
        flight.close()
    write_json_atomic(root / RESULT, {"preflight": asdict(measured), "samples": samples})


class Preflight:
    """Example: `flight = Preflight(assemble(root)); measured, samples = flight.measure(); flight.close()`."""

    def __init__(self, parts: Any) -> None:
        self._parts = parts
        self._by_vllm: bool = parts.started.kind == "vllm"
        self._model = _load_model(parts)
        self._recorded: dict[str, float] = {}
        self._prompts, self._lengths = self._look_at_prompts()
        self._rounds = self._make_rounds() if self._prompts else None

    def _look_at_prompts(self) -> tuple[list[Prompt], PromptCount]:
        """The prompts that fit, and the lengths of all."""
        prompts: Sequence[Prompt] = self._parts.prompts.prompts
        room: int = self._parts.max_prompt_tokens
        lengths = [len(self._parts.encode(prompt)) for prompt in prompts]
        longest = max(range(len(lengths)), key=lambda index: lengths[index])
        fitting = [prompt for prompt, length in zip(prompts, lengths, strict=True) if 0 < length <= room]
        too_long = sum(length > room for length in lengths)
        return fitting, PromptCount(len(prompts), lengths[longest], prompts[longest].row, too_long, room)

    def _make_rounds(self) -> Any:
        from ycore.engine.transformers_engine import TransformersEngine
        from ycore.round.sampling import DrawSource

        parts = self._parts
        engines = (
            parts.vllm_engines()
            if self._by_vllm
            else [TransformersEngine(self._model, parts.tokenizer, parts.sampling())]
        )
        draws = DrawSource(
            self._prompts, seed=parts.config.seed, encode=parts.encode, max_prompt_tokens=parts.max_prompt_tokens
        )
        rounds = parts.controller(
            engines,
            draws=draws,
            rules=replace(parts.rules(num_engines=len(engines)), dynamic=False),
            share_weights=self._share_weights if self._by_vllm and parts.config.sync_weights else None,
        )
        rounds.record = self._recorded.__setitem__
        return rounds

    def _share_weights(self, version: int) -> Path:
        from ycore.engine.weights import write_weights
        from ycore.trl.grpo import compute_dtype

        folder: Path = self._parts.folder.shared_memory
        write_weights(self._model, folder, dtype=compute_dtype(self._parts.config), version=version)
        return folder

    def stop(self) -> None:
        if self._rounds is not None:
            self._rounds.stop.set()

    def close(self) -> None:
        if self._rounds is not None:
            self._rounds.close()

    def measure(self) -> tuple[Measurements, list[dict[str, Any]]]:
        """All measurements, and a few completions from the worst reward to the best."""
        measured = self._measured_without_engines()
        if self._rounds is None:
            return measured, []
        self._rounds.start(timeout_s=self._parts.config.engine.start_timeout_s)
        self._parts.folder.step_began.touch()
        groups = self._rounds.next_round(step=0, num_groups=min(NUM_PROMPTS, len(self._prompts)))
        weights = [reward.weight for reward in self._parts.config.rewards]
        names = [reward.reward for reward in self._parts.config.rewards]
        measured = replace(measured, **of_groups(groups, weights=weights, names=names), **self._of_round())
        if self._by_vllm:
            measured = replace(measured, **self._gaps(groups))
        return measured, samples(groups, weights=weights)

    def _measured_without_engines(self) -> Measurements:
        config, started = self._parts.config, self._parts.started
        return Measurements(
            num_prompts=0,
            group_size=config.group_size,
            max_tokens=config.max_tokens,
            context=started.max_model_len,
            truncated=0.0,
            equal=0.0,
            rewards=(),
            masked=0.0,
            prompts=self._lengths,
            template=self._template(),
        )

    def _template(self) -> TemplateCheck:

        prompt = self._parts.prompts.prompts[0]
        if not prompt.is_chat:
            return TemplateCheck()
        return check_template(self._parts.tokenizer, prompt.content, ends=self._parts.sampling().stop_token_ids)

    def _of_round(self) -> dict[str, Any]:
        """Seconds and judges' counts, as the round recorded them."""
        told = self._recorded
        generate = told.get("ycore/time/generate", 0.0)
        calls = int(told.get("ycore/judge/calls", 0))
        judges = JudgeCount(
            calls, int(told.get("ycore/judge/parse_failures", 0)), told.get("ycore/judge/latency_s", 0.0)
        )
        assert self._rounds is not None
        return {
            "generate_s": generate,
            "reward_s": max(0.0, told.get("ycore/time/round", 0.0) - generate),
            "judges": judges if calls else None,
            "problems": dict(self._rounds.problems),
        }

    def _gaps(self, groups: Sequence[Group]) -> dict[str, Any]:
        """Engine against trainer: on the first weights, and after a sync of changed ones."""
        gap = self._gap(groups)
        assert self._rounds is not None
        with _Sharpened(self._model):
            after = self._rounds.next_round(step=1, num_groups=min(_SYNC_PROMPTS, len(self._prompts)))
            sent = self._gap(after)
        return {"logprob_gap": gap, "sync_gap": sent, "stale_gap": self._gap(after)}

    def _gap(self, groups: Sequence[Group]) -> float | None:
        """Mean absolute difference of the log-probabilities that the engine told and the model computes."""
        pairs = [(group.draw.token_ids, completion) for group in groups for completion in group.completions]
        temperature = float(self._parts.config.trl.get("temperature", 1.0)) or 1.0
        gaps = [
            abs(told - computed)
            for prompt_ids, completion in pairs[:: max(1, len(pairs) // _SCORED)][:_SCORED]
            for told, computed in zip(
                completion.logprobs or (),
                _logprobs(self._model, prompt_ids, completion, temperature=temperature),
                strict=False,
            )
        ]
        return sum(gaps) / len(gaps) if gaps else None


def of_groups(groups: Sequence[Group], *, weights: Sequence[float], names: Sequence[str]) -> dict[str, Any]:
    """What a round's groups say: shares, rewards, and the mean of every source."""
    completions = [completion for group in groups for completion in group.completions]
    rows = [scores for group in groups for scores in group.scores_GR]
    by_group = [[total_reward(scores, weights) for scores in group.scores_GR] for group in groups]
    rewards = [reward for group in by_group for reward in group if reward is not None]
    return {
        "num_prompts": len(groups),
        "truncated": _share(completion.finish_reason == "length" for completion in completions),
        "equal": _share(len({reward for reward in group if reward is not None}) < 2 for group in by_group),
        "rewards": tuple(rewards),
        "masked": 1 - len(rewards) / len(rows),
        "means": {name: _mean([scores[r].value for scores in rows]) for r, name in enumerate(names)},
        "mean_tokens": sum(len(completion.token_ids) for completion in completions) / len(completions),
    }


def samples(groups: Sequence[Group], *, weights: Sequence[float]) -> list[dict[str, Any]]:
    """A few completions, evenly from the lowest reward to the highest; those without a reward come first."""
    rows = [
        (total_reward(scores, weights), group, completion)
        for group in groups
        for completion, scores in zip(group.completions, group.scores_GR, strict=True)
    ]
    rows.sort(key=lambda row: float("-inf") if row[0] is None else row[0])
    step = max(1, (len(rows) - 1) // max(1, _SAMPLES - 1))
    return [
        {"prompt": group.draw.prompt.content, "completion": completion.text, "reward": reward,
         "finish_reason": completion.finish_reason}
        for reward, group, completion in rows[::step][:_SAMPLES]
    ]  # fmt: skip


def _share(answers: Iterable[bool]) -> float:
    told = list(answers)
    return sum(told) / len(told)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _load_model(parts: Any) -> Any:
    from transformers import AutoModelForCausalLM

    from ycore.trl.grpo import compute_dtype

    return AutoModelForCausalLM.from_pretrained(
        parts.started.model, dtype=compute_dtype(parts.config), trust_remote_code=parts.config.trust_remote_code
    )


def _logprobs(model: Any, prompt_ids: Sequence[int], completion: Completion, *, temperature: float) -> list[float]:
    """The model's own log-probability of every token of a completion."""
    import torch

    ids = torch.tensor([[*prompt_ids, *completion.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1 : -1].float() / temperature
    chosen = torch.tensor(completion.token_ids).unsqueeze(-1)
    return [float(value) for value in torch.log_softmax(logits, dim=-1).gather(-1, chosen).squeeze(-1)]


class _Sharpened:
    """Within it the model's last norm is larger, so that its distribution is another; after it, as it was."""

    def __init__(self, model: Any) -> None:
        self._weight = [weight for weight in model.parameters() if weight.ndim == 1][-1]
        self._before = self._weight.detach().clone()

    def __enter__(self) -> None:
        self._weight.data.mul_(_SHARPER)

    def __exit__(self, *exception: object) -> None:
        self._weight.data.copy_(self._before)


if __name__ == "__main__":
    sys.exit(main())
