"""`python -m ycore.evaluation.preflight_round RUN_FOLDER`: one small round with everything of the run but training.

It measures how many completions are cut off, how many groups can teach, how far engine and trainer are apart, and
whether changed weights reach the engine. It leaves `preflight.json`; `preflight_verdict` judges the figures.
"""

import re
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import stdev
from typing import TYPE_CHECKING, Any

from ycore.config.trl_fields import fields_of
from ycore.evaluation.evaluator import load_policy, mean
from ycore.evaluation.preflight_verdict import (
    NUM_PROMPTS,
    JudgeCount,
    Measurements,
    PromptCount,
    TemplateCheck,
)
from ycore.run.files import write_json_atomic
from ycore.run.interrupt import on_stop
from ycore.run.reports import run_alone
from ycore.scoring.group_rewards import rewards_differ, total_reward
from ycore.types import Completion, Group, Message, Prompt

if TYPE_CHECKING:
    from ycore.config.schema import RunConfig
    from ycore.round.assemble import Assembly
    from ycore.round.step import Controller

_SYNC_PROMPTS = 2
_SCORED = 16  # completions whose log-probabilities the model computes again, each in its own pass
_SHARPER = (
    2.0  # the last norm is multiplied by it: so is every logit, and every log-probability moves
)
_NUM_SAMPLES = 4


def _preflight(root: Path) -> None:
    from ycore.round.assemble import assemble

    measured, shown = Preflight(assemble(root)).measure()
    write_json_atomic(root / "preflight.json", {"preflight": asdict(measured), "samples": shown})


class Preflight:
    """Example: `measured, samples = Preflight(assemble(root)).measure()`."""

    def __init__(self, parts: "Assembly") -> None:
        self._parts = parts
        self._has_servers = parts.kind.has_servers
        self._model = load_policy(parts)
        self._recorded: dict[str, float] = {}
        self._prompts, self._lengths = self._fitting_prompts()

    def measure(self) -> tuple[Measurements, list[dict[str, Any]]]:
        """All measurements, and a few completions from the worst reward to the best."""
        parts, config = self._parts, self._parts.config
        first = parts.prompts.prompts[0].content
        ends = parts.sampling().stop_token_ids
        measured = Measurements(
            num_prompts=0,
            group_size=config.group_size,
            max_tokens=config.max_tokens,
            context=parts.started.max_model_len,
            truncated=0.0,
            equal=0.0,
            rewards=(),
            masked=0.0,
            prompts=self._lengths,
            template=TemplateCheck()
            if isinstance(first, str)
            else check_template(parts.tokenizer, first, ends=ends),
        )
        if not self._prompts:
            return measured, []
        controller = self._make_controller()
        on_stop(controller.stop.set)
        try:
            controller.start(timeout_s=config.engine.start_timeout_s)
            parts.folder.step_began.touch()
            groups = controller.next_round(step=0, num_groups=min(NUM_PROMPTS, len(self._prompts)))
            figures = self._of_round(controller)
            compares = (
                self._has_servers and parts.sight is None
            )  # the trainer's side here reads text only
            figures |= self._gaps(controller, groups) if compares else {}
        finally:
            controller.close()
        weights = parts.rules().reward_weights
        figures |= of_groups(
            groups, weights=weights, names=[reward.reward for reward in config.rewards]
        )
        return replace(measured, **figures), samples(groups, weights=weights)

    def _fitting_prompts(self) -> tuple[list[Prompt], PromptCount]:
        """The prompts that leave room for a completion, and the lengths of all."""
        prompts, room = self._parts.prompts.prompts, self._parts.max_prompt_tokens
        lengths = [len(self._parts.encode(prompt)) for prompt in prompts]
        longest = max(range(len(lengths)), key=lambda index: lengths[index])
        fitting = [
            prompt for prompt, length in zip(prompts, lengths, strict=True) if 0 < length <= room
        ]
        too_long = sum(length > room for length in lengths)
        return fitting, PromptCount(
            len(prompts), lengths[longest], prompts[longest].row, too_long, room
        )

    def _make_controller(self) -> "Controller":
        from ycore.round.sampling import DrawSource

        parts = self._parts
        engines = parts.engines(self._model)
        draws = DrawSource(
            self._prompts,
            seed=parts.config.seed,
            encode=parts.encode,
            max_prompt_tokens=parts.max_prompt_tokens,
        )
        controller = parts.controller(
            engines,
            draws=draws,
            rules=replace(parts.rules(num_engines=len(engines)), dynamic=False, oversample=1.0),
            share_weights=self._share_weights
            if self._has_servers and parts.config.sync_every
            else None,
        )
        controller.record = self._recorded.__setitem__
        return controller

    def _share_weights(self, version: int) -> Path:
        from ycore.engine.weights import write_weights
        from ycore.trl.build import compute_dtype

        folder = self._parts.folder.shared_memory
        write_weights(self._model, folder, dtype=compute_dtype(self._parts.config), version=version)
        return folder

    def _of_round(self, controller: "Controller") -> dict[str, Any]:
        """Seconds and the judges' counts, as the round recorded them."""
        recorded = self._recorded
        generate = recorded.get("ycore/time/generate", 0.0)
        calls, failures = (
            int(recorded.get(f"ycore/judge/{name}", 0)) for name in ("calls", "parse_failures")
        )
        return {
            "generate_s": generate,
            "reward_s": max(0.0, recorded.get("ycore/time/round", 0.0) - generate),
            "judges": JudgeCount(calls, failures, recorded.get("ycore/judge/latency_s", 0.0))
            if calls
            else None,
            "problems": dict(controller.meter.problems),
        }

    def _gaps(self, controller: "Controller", groups: Sequence[Group]) -> dict[str, Any]:
        """Engine against trainer: on the first weights, after a sync of changed ones, and without that sync."""
        gaps = self._log_ratios(groups)
        with _sharpened(self._model):
            after = controller.next_round(step=1, num_groups=min(_SYNC_PROMPTS, len(self._prompts)))
            synced = self._gap(after)
        return {
            "logprob_gap": mean(map(abs, gaps)),
            "gap_spread": stdev(gaps) if len(gaps) > 1 else 0.0,
            "weight_limit": weight_limit(self._parts.config),
            "sync_gap": synced,
            "stale_gap": self._gap(after),
        }

    def _gap(self, groups: Sequence[Group]) -> float | None:
        return mean(map(abs, self._log_ratios(groups)))

    def _log_ratios(self, groups: Sequence[Group]) -> list[float]:
        """Of some tokens, the model's log-probability less the engine's."""
        pairs = [
            (group.prompt_ids(completion), completion)
            for group in groups
            for completion in group.completions
        ]
        pairs = [pair for pair in pairs if not any(turn.begins for turn in pair[1].turns)]
        temperature = float(self._parts.config.trl.get("temperature", 1.0)) or 1.0
        return [
            computed - engine
            for prompt_ids, completion in pairs[:: max(1, len(pairs) // _SCORED)][:_SCORED]
            for engine, computed, by_policy in zip(
                completion.logprobs or (),
                _logprobs(self._model, prompt_ids, completion, temperature=temperature),
                completion.mask,
                strict=False,
            )
            if by_policy
        ]


def weight_limit(config: "RunConfig") -> float | None:
    """Of TRL's `sequence_mask`, which leaves out whole completions and is its default; None where it does not act."""
    names = [f"vllm_importance_sampling_{name}" for name in ("correction", "mode", "clip_max")]
    corrects, mode, limit = (
        config.trl.get(name, fields_of("GRPOConfig")[name].default) for name in names
    )
    masks = config.trust_region in ("clip", "clip-completion") and config.loss_from == "grpo"
    return (
        float(limit)
        if masks and corrects and mode == "sequence_mask" and limit is not None
        else None
    )


def of_groups(
    groups: Sequence[Group], *, weights: Sequence[float], names: Sequence[str]
) -> dict[str, Any]:
    """What a round's groups show: shares, rewards, and the mean of every source."""
    completions = [completion for group in groups for completion in group.completions]
    rows = [scores for group in groups for scores in group.scores_GR]
    by_group = [[total_reward(scores, weights) for scores in group.scores_GR] for group in groups]
    rewards = [reward for group in by_group for reward in group if reward is not None]
    return {
        "num_prompts": len(groups),
        "truncated": sum(completion.finish_reason == "length" for completion in completions)
        / len(completions),
        "equal": sum(not rewards_differ(group) for group in by_group) / len(groups),
        "rewards": tuple(rewards),
        "masked": 1 - len(rewards) / len(rows),
        "means": {name: mean(scores[r].value for scores in rows) for r, name in enumerate(names)},
        "mean_tokens": sum(sum(completion.mask) for completion in completions) / len(completions),
    }


def samples(groups: Sequence[Group], *, weights: Sequence[float]) -> list[dict[str, Any]]:
    """A few completions, evenly from the lowest reward to the highest; those without a reward come first."""
    rows = [
        (total_reward(scores, weights), group, completion)
        for group in groups
        for completion, scores in zip(group.completions, group.scores_GR, strict=True)
    ]
    rows.sort(key=lambda row: float("-inf") if row[0] is None else row[0])
    step = max(1, (len(rows) - 1) // max(1, _NUM_SAMPLES - 1))
    return [
        {"prompt": group.draw.prompt.content, "completion": completion.transcript, "reward": reward,
         "finish_reason": completion.finish_reason}
        for reward, group, completion in rows[::step][:_NUM_SAMPLES]
    ]  # fmt: skip


def _logprobs(
    model: Any, prompt_ids: Sequence[int], completion: Completion, *, temperature: float
) -> list[float]:
    """The model's log-probability of every token of a completion."""
    import torch

    ids = torch.tensor([[*prompt_ids, *completion.token_ids]], device=model.device)
    with torch.no_grad():
        logits = (
            model(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1 : -1].float()
            / temperature
        )
    chosen = torch.tensor(completion.token_ids, device=model.device).unsqueeze(-1)
    return [
        float(value) for value in torch.log_softmax(logits, dim=-1).gather(-1, chosen).squeeze(-1)
    ]


@contextmanager
def _sharpened(model: Any) -> Iterator[None]:
    """Make the model's last norm larger, and so its distribution another; afterwards the norm is as before."""
    weight = [weight for weight in model.parameters() if weight.ndim == 1][-1]
    before = weight.detach().clone()
    weight.data.mul_(_SHARPER)
    try:
        yield
    finally:
        weight.data.copy_(before)


# -- the chat template -------------------------------------------------------------------------------------------------

_MARKER = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|\[/?INST\]|<(?:start|end)_of_turn>|<\|(?:im_start|im_end)\|>"
)
_ANSWER = "yes"


def check_template(
    tokenizer: Any, messages: Sequence[Message], *, ends: Collection[int]
) -> TemplateCheck:
    """What is wrong with the tokenizer's chat template, on one prompt of the dataset.

    Args:
        messages: a prompt that ends with the user's turn.
        ends: ids of the tokens that end a completion.
    """
    prompt = _rendered(tokenizer, messages, add_generation_prompt=True)
    encode, unknown = partial(tokenizer.encode, add_special_tokens=False), tokenizer.unk_token_id
    problems = []
    # Markers that are one token in another family's tokenizer, and several in this one.
    pieces = {marker: encode(marker) for marker in sorted(set(_MARKER.findall(prompt)))}
    foreign = [marker for marker, ids in pieces.items() if len(ids) != 1 or ids[0] == unknown]
    if foreign:
        problems.append(
            f"it writes {', '.join(foreign)}, which this tokenizer does not have as a token"
        )
    lost = [turn["role"] for turn in messages if turn["content"].strip() not in prompt]
    if lost:
        problems.append(f"what the {lost[-1]} says is not in what it writes")
    if prompt == _rendered(tokenizer, messages, add_generation_prompt=False):
        problems.append("nothing in it says that the assistant's turn begins")
    ids = encode(prompt)
    if ids.count(unknown) > 0.2 * len(
        ids
    ):  # a few are rare letters of the prompt; many, another vocabulary's template
        problems.append(f"{ids.count(unknown)} of its {len(ids)} tokens are unknown to the model")
    return TemplateCheck(tuple(problems), _end_of_turn(tokenizer, messages, ends=ends))


def _rendered(tokenizer: Any, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    text = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
    )
    return str(text)


def _end_of_turn(
    tokenizer: Any, messages: Sequence[Message], *, ends: Collection[int]
) -> str | None:
    """The first token after an answer, if it is special and does not end a completion."""
    answer: Message = {"role": "assistant", "content": _ANSWER}
    _, found, after = _rendered(
        tokenizer, [*messages, answer], add_generation_prompt=False
    ).rpartition(_ANSWER)
    ids = tokenizer.encode(after, add_special_tokens=False) if found and after else []
    if not ids or ids[0] in ends or ids[0] not in tokenizer.all_special_ids:
        return None
    return str(tokenizer.convert_ids_to_tokens(ids[0]))


if __name__ == "__main__":
    sys.exit(run_alone("ycore.evaluation.preflight_round", _preflight))
