"""`python -m ycore.evaluation.preflight RUN_FOLDER`: one small round with everything of the run but training.

It measures how many completions are cut off, how many groups can teach, and how far engine and trainer are apart. It
leaves `preflight.json`; `preflight_verdict` judges the figures. Whether synced weights arrive, the run itself proves.
"""

import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from ycore.config.trl_fields import fields_of
from ycore.evaluation.evaluator import load_policy
from ycore.evaluation.held_out import mean_of_known
from ycore.evaluation.preflight_verdict import (
    NUM_PROMPTS,
    JudgeCalls,
    PreflightMeasurements,
    PromptLengths,
    TemplateCheck,
)
from ycore.round.sampling import DrawSource
from ycore.run.files import write_json_atomic
from ycore.run.interrupt import on_stop
from ycore.run.reports import run_alone
from ycore.scoring.group_rewards import can_teach, total_reward
from ycore.types import Completion, Group, Message, Prompt

if TYPE_CHECKING:
    from ycore.config.schema import RunConfig
    from ycore.round.assemble import Assembly

_NUM_COMPARED = 16  # completions whose log-probabilities the model computes again
_NUM_SAMPLES = 4


def _preflight(root: Path) -> None:
    from ycore.round.assemble import assemble

    measured, samples = run_preflight(assemble(root))
    write_json_atomic(
        root / "preflight.json", {"preflight": asdict(measured), "samples": samples}
    )


def run_preflight(
    parts: "Assembly",
) -> tuple[PreflightMeasurements, list[dict[str, Any]]]:
    """Return all measurements, and a few completions from the worst reward to the best."""
    config, rules = parts.config, parts.rules()
    prompts = parts.prompts.prompts
    lengths = [len(parts.encode(prompt)) for prompt in prompts]
    measured = _measure_prompts(parts, lengths)
    fitting = [
        prompt
        for prompt, length in zip(prompts, lengths, strict=True)
        if 0 < length <= parts.max_prompt_tokens
    ]
    if not fitting:
        return measured, []
    model = load_policy(parts)
    recorded: dict[str, float] = {}
    groups, problems = _run_round(parts, model, fitting, recorded)
    measured = add_groups(
        measured,
        groups,
        weights=rules.reward_weights,
        names=[reward.reward for reward in config.rewards],
        alone=rules.teaches_alone,
    )
    measured = replace(_add_recorded(measured, recorded), problems=problems)
    if parts.kind.has_servers and parts.sight is None:  # the model here reads text only
        temperature = float(config.trl.get("temperature", 1.0)) or 1.0
        log_ratios = _log_ratios(model, groups, temperature)
        gap = fmean(map(abs, log_ratios)) if log_ratios else None
        spread = pstdev(log_ratios) if log_ratios else 0.0
        measured = replace(measured, logprob_gap=gap, gap_spread=spread)
    return measured, samples_of(groups, weights=rules.reward_weights)


def _measure_prompts(parts: "Assembly", lengths: Sequence[int]) -> PreflightMeasurements:
    """Return what is known before the round: the prompts' lengths, the chat template, the run's limits."""
    config, prompts, room = parts.config, parts.prompts.prompts, parts.max_prompt_tokens
    longest = max(range(len(lengths)), key=lambda index: lengths[index])
    template = TemplateCheck()
    first = prompts[0].content
    if not isinstance(first, str):
        ends = parts.sampling().stop_token_ids
        template = check_template(parts.tokenizer, first, ends=ends)
    return PreflightMeasurements(
        num_prompts=0,
        group_size=config.group_size,
        max_tokens=config.max_tokens,
        context=parts.started.max_model_len,
        truncated=0.0,
        equal=0.0,
        rewards=(),
        masked=0.0,
        weight_limit=weight_limit(config),
        template=template,
        prompts=PromptLengths(
            rows=len(lengths),
            longest=lengths[longest],
            longest_row=prompts[longest].row,
            too_long=sum(length > room for length in lengths),
            room=room,
        ),
    )


def _run_round(
    parts: "Assembly", model: Any, prompts: Sequence[Prompt], recorded: dict[str, float]
) -> tuple[list[Group], dict[str, int]]:
    """Return the groups of a round, which fills `recorded`, and how often each problem kept a source from scoring."""
    engines = parts.engines(model)
    controller = parts.controller(
        engines,
        draws=DrawSource(
            prompts,
            seed=parts.config.seed,
            encode=parts.encode,
            max_prompt_tokens=parts.max_prompt_tokens,
        ),
        rules=replace(parts.rules(num_engines=len(engines)), dynamic=False, oversample=1.0),
    )
    controller.record = recorded.__setitem__
    on_stop(controller.stop.set)
    try:
        controller.start(timeout_s=parts.config.engine.start_timeout_s)
        parts.folder.step_began.touch()
        groups = controller.next_round(step=0, num_groups=min(NUM_PROMPTS, len(prompts)))
    finally:
        controller.close()
    return groups, dict(controller.meter.problems)


def add_groups(
    measured: PreflightMeasurements,
    groups: Sequence[Group],
    *,
    weights: Sequence[float],
    names: Sequence[str],
    alone: bool = False,
) -> PreflightMeasurements:
    """Add what a round's groups show: shares, rewards, and the mean of every source."""
    completions = [completion for group in groups for completion in group.completions]
    rows = [scores for group in groups for scores in group.scores_GR]
    totals = [total_reward(scores, weights) for scores in rows]
    rewards = tuple(total for total in totals if total is not None)
    num_cut = sum(completion.finish_reason == "length" for completion in completions)
    num_tokens = sum(sum(completion.mask) for completion in completions)
    num_teaching = sum(can_teach(group, weights, alone=alone) for group in groups)
    return replace(
        measured,
        num_prompts=len(groups),
        truncated=num_cut / len(completions),
        equal=1 - num_teaching / len(groups),
        rewards=rewards,
        masked=1 - len(rewards) / len(rows),
        means={
            name: mean_of_known(scores[source].value for scores in rows)
            for source, name in enumerate(names)
        },
        mean_tokens=num_tokens / len(completions),
    )


def _add_recorded(
    measured: PreflightMeasurements, recorded: dict[str, float]
) -> PreflightMeasurements:
    """Add seconds and the judges' counts, as the round recorded them."""
    generate_s = recorded.get("ycore/time/generate", 0.0)
    reward_s = max(0.0, recorded.get("ycore/time/round", 0.0) - generate_s)
    measured = replace(measured, generate_s=generate_s, reward_s=reward_s)
    calls = int(recorded.get("ycore/judge/calls", 0))
    if not calls:
        return measured
    unreadable = int(recorded.get("ycore/judge/parse_failures", 0))
    latency_s = recorded.get("ycore/judge/latency_s", 0.0)
    return replace(measured, judges=JudgeCalls(calls, unreadable, latency_s))


def weight_limit(config: "RunConfig") -> float | None:
    """Return the limit of TRL's `sequence_mask`, which leaves out whole completions; None where it does not act."""

    def setting(name: str) -> Any:
        name = f"vllm_importance_sampling_{name}"
        return config.trl.get(name, fields_of("GRPOConfig")[name].default)

    limit = setting("clip_max")
    if (
        not config.masks_whole_completions
        or not setting("correction")
        or setting("mode") != "sequence_mask"
    ):
        return None
    return None if limit is None else float(limit)


def samples_of(groups: Sequence[Group], *, weights: Sequence[float]) -> list[dict[str, Any]]:
    """Return a few completions, evenly from the lowest reward to the highest; those without a reward come first."""
    samples = [
        {
            "prompt": group.draw.prompt.content,
            "completion": completion.transcript,
            "reward": total_reward(scores, weights),
            "finish_reason": completion.finish_reason,
        }
        for group in groups
        for completion, scores in zip(group.completions, group.scores_GR, strict=True)
    ]
    lowest = float("-inf")
    samples.sort(key=lambda row: lowest if row["reward"] is None else row["reward"])
    return samples[:: max(1, (len(samples) - 1) // (_NUM_SAMPLES - 1))][:_NUM_SAMPLES]


# -- log-probabilities -------------------------------------------------------------------------------------------------


def _log_ratios(model: Any, groups: Sequence[Group], temperature: float) -> list[float]:
    """Return the model's log-probability less the engine's, of the policy's tokens of some completions."""
    pairs = [
        (group.prompt_ids(completion), completion)
        for group in groups
        for completion in group.completions
        if not any(turn.starts_new_sequence for turn in completion.turns)
    ]
    ratios = []
    for prompt_ids, completion in pairs[:: max(1, len(pairs) // _NUM_COMPARED)][:_NUM_COMPARED]:
        computed = _logprobs(model, prompt_ids, completion, temperature)
        for engine_logprob, logprob, by_policy in zip(
            completion.logprobs or (), computed, completion.mask, strict=False
        ):
            if by_policy:
                ratios.append(logprob - engine_logprob)
    return ratios


def _logprobs(
    model: Any, prompt_ids: Sequence[int], completion: Completion, temperature: float
) -> list[float]:
    """Return the model's log-probability of every token of a completion."""
    import torch

    ids = torch.tensor([[*prompt_ids, *completion.token_ids]], device=model.device)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1 : -1]
    logps = torch.log_softmax(logits.float() / temperature, dim=-1)
    tokens = torch.tensor(completion.token_ids, device=model.device).unsqueeze(-1)
    return [float(value) for value in logps.gather(-1, tokens).squeeze(-1)]


# -- the chat template -------------------------------------------------------------------------------------------------

_MARKER = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|\[/?INST\]|<(?:start|end)_of_turn>|<\|(?:im_start|im_end)\|>"
)
_ANSWER = "yes"


def check_template(
    tokenizer: Any, messages: Sequence[Message], *, ends: Collection[int]
) -> TemplateCheck:
    """Find what is wrong with the tokenizer's chat template, on one prompt of the dataset.

    Args:
        messages: a prompt that ends with the user's turn.
        ends: ids of the tokens that end a completion.
    """
    prompt = _render(tokenizer, messages, add_generation_prompt=True)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    unknown = tokenizer.unk_token_id
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
    if prompt == _render(tokenizer, messages, add_generation_prompt=False):
        problems.append("nothing in it says that the assistant's turn begins")
    ids = encode(prompt)
    num_unknown = ids.count(unknown)
    if num_unknown > 0.2 * len(ids):  # many are of another vocabulary; a few are rare letters
        problems.append(f"{num_unknown} of its {len(ids)} tokens are unknown to the model")
    return TemplateCheck(tuple(problems), _end_of_turn(tokenizer, messages, ends=ends))


def _render(tokenizer: Any, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    text = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
    )
    return str(text)


def _end_of_turn(
    tokenizer: Any, messages: Sequence[Message], *, ends: Collection[int]
) -> str | None:
    """Return the first token after an answer, if it is special and does not end a completion."""
    answer: Message = {"role": "assistant", "content": _ANSWER}
    text = _render(tokenizer, [*messages, answer], add_generation_prompt=False)
    _, answered, after = text.rpartition(_ANSWER)
    ids = tokenizer.encode(after, add_special_tokens=False) if answered and after else []
    if not ids or ids[0] in ends or ids[0] not in tokenizer.all_special_ids:
        return None
    return str(tokenizer.convert_ids_to_tokens(ids[0]))


if __name__ == "__main__":
    sys.exit(run_alone("ycore.evaluation.preflight", _preflight))
