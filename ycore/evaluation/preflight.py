"""`python -m ycore.evaluation.preflight RUN_FOLDER`: one small round with everything of the run but training.

It measures how many completions are cut off and how many groups can teach, and leaves `preflight.json`.
`preflight_verdict` judges the figures: will this run learn anything, and if not, what to change. Whether synced weights
arrive, the run itself proves, and its steps record how far engine and trainer are apart.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ycore.evaluation.evaluator import own_model, started
from ycore.evaluation.held_out import mean_of_known
from ycore.run.files import write_json_atomic
from ycore.run.reports import run_alone
from ycore.scoring.group_rewards import total_reward, without_none
from ycore.types import Group, JsonObject, Metrics, Prompt

if TYPE_CHECKING:
    from ycore.round.assemble import Assembly
    from ycore.round.sampling import Rules
    from ycore.round.step import Controller

_NUM_SAMPLES = 4

Level = Literal["stops", "warns"]

NUM_PROMPTS = 16  # prompts of a preflight, each for a whole group of completions
TRUNCATED_STOPS = 0.9
TRUNCATED_WARNS = 0.25
EQUAL_WARNS = 0.75
UNREADABLE_STOPS = 0.9
UNREADABLE_WARNS = 0.1
MASKED_WARNS = 0.1


@dataclass(frozen=True)
class JudgeCalls:
    """Requests to all judges, and answers whose verdict cannot be read."""

    calls: int
    unreadable: int


@dataclass(frozen=True)
class PromptLengths:
    """Lengths of all prompts of the dataset, in tokens as the engine gets them.

    Attributes:
        too_long: prompts that leave no room for a completion.
        room: tokens that a prompt may have: the engine's context minus the longest completion.
    """

    rows: int
    longest: int
    longest_row: int
    too_long: int
    room: int


@dataclass(frozen=True)
class PreflightMeasurements:
    """Results of a preflight's round.

    Attributes:
        truncated: share of completions cut off at `max_tokens`.
        equal: share of groups that cannot teach, whose rewards are as good as equal.
        rewards: the weighted sum of its sources, of every scored completion.
        masked: share of completions that no source could score.
        problems: how often each problem kept a source from scoring.
        means: mean of each reward source; None where it scored nothing.
        reward_s: seconds from the last completion of the round until all were scored.
    """

    group_size: int
    max_tokens: int
    context: int
    prompts: PromptLengths
    num_prompts: int = 0
    truncated: float = 0.0
    equal: float = 0.0
    rewards: tuple[float, ...] = ()
    masked: float = 0.0
    problems: Mapping[str, int] = field(default_factory=dict)
    means: Mapping[str, float | None] = field(default_factory=dict)
    generate_s: float = 0.0
    reward_s: float = 0.0
    judges: JudgeCalls | None = None


# -- the round ---------------------------------------------------------------------------------------------------------


def _preflight(root: Path) -> None:
    from ycore.round.assemble import assemble

    measured, samples = measure_round(assemble(root))
    verdict = asdict(preflight_verdict(measured))
    write_json_atomic(
        root / "preflight.json",
        {"preflight": asdict(measured), "samples": samples, **verdict},
    )


def measure_round(
    parts: "Assembly",
) -> tuple[PreflightMeasurements, list[JsonObject]]:
    """Return all measurements, and a few completions from the worst reward to the best."""
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
    controller = _controller(parts, fitting)
    recorded: Metrics = {}
    controller.record = recorded.__setitem__
    with started(controller, parts):
        groups = controller.next_round(step=0, num_groups=min(NUM_PROMPTS, len(fitting)))
    names = [reward.reward for reward in parts.config.rewards]
    measured = add_groups(measured, groups, controller.rules, names)
    generate_s = recorded.get("ycore/time/generate", 0.0)
    judges = None
    if calls := int(recorded.get("ycore/judge/calls", 0)):
        judges = JudgeCalls(calls, int(recorded.get("ycore/judge/parse_failures", 0)))
    measured = replace(
        measured,
        problems=controller.problems,
        generate_s=generate_s,
        reward_s=max(0.0, recorded.get("ycore/time/round", 0.0) - generate_s),
        judges=judges,
    )
    return measured, samples_of(groups, weights=controller.rules.reward_weights)


def _measure_prompts(parts: "Assembly", lengths: Sequence[int]) -> PreflightMeasurements:
    """Return what is known before the round: the prompts' lengths and the run's limits."""
    config = parts.config
    room = parts.max_prompt_tokens
    longest = max(range(len(lengths)), key=lambda index: lengths[index])
    prompts = PromptLengths(
        rows=len(lengths),
        longest=lengths[longest],
        longest_row=parts.prompts.prompts[longest].row,
        too_long=sum(length > room for length in lengths),
        room=room,
    )
    return PreflightMeasurements(
        group_size=config.group_size,
        max_tokens=config.max_tokens,
        context=parts.started.max_model_len,
        prompts=prompts,
    )


def _controller(parts: "Assembly", prompts: Sequence[Prompt]) -> "Controller":
    """Return the controller of a round of these prompts, as they come."""
    from ycore.round.sampling import DrawSource  # loads torch, which a verdict does without

    engines = parts.engines(own_model(parts))
    draws = DrawSource(
        prompts,
        seed=parts.config.seed,
        encode=parts.encode,
        max_prompt_tokens=parts.max_prompt_tokens,
    )
    rules = replace(parts.rules(engines), dynamic=False, oversample=1.0)
    controller = parts.controller(engines, draws=draws, rules=rules)
    controller.meter.requires_scores = False
    return controller


def add_groups(
    measured: PreflightMeasurements,
    groups: Sequence[Group],
    rules: "Rules",
    names: Sequence[str],
) -> PreflightMeasurements:
    """Add what a round's groups show: shares, rewards, and the mean of every source."""
    completions = [completion for group in groups for completion in group.completions]
    rows = [scores for group in groups for scores in group.scores_GR]
    totals = [total_reward(scores, rules.reward_weights) for scores in rows]
    rewards = tuple(without_none(totals))
    num_cut = sum(completion.finish_reason == "length" for completion in completions)
    num_teaching = sum(map(rules.can_teach, groups))
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
    )


def samples_of(groups: Sequence[Group], *, weights: Sequence[float]) -> list[JsonObject]:
    """Return a few completions, evenly from the lowest reward to the highest; those without a reward come first."""
    samples = [
        {
            "prompt": group.draw.prompt.content,
            "completion": completion.transcript,
            "reward": total_reward(scores, weights),
            "finish_reason": completion.finish_reason,
        }
        for group in groups
        for completion, scores in group.scored()
    ]
    lowest = float("-inf")
    samples.sort(key=lambda row: lowest if row["reward"] is None else row["reward"])
    shown = min(_NUM_SAMPLES, len(samples))
    return [samples[(len(samples) - 1) * at // max(1, shown - 1)] for at in range(shown)]


# -- the verdict -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """A measurement in words, and what to change; its `level` is None where it is fine."""

    level: Level | None
    what: str
    mend: str


@dataclass(frozen=True)
class PreflightVerdict:
    """`learns` is False where a finding stops learning; findings come worst first."""

    learns: bool
    in_words: str
    findings: tuple[Finding, ...]


def preflight_verdict(measured: PreflightMeasurements) -> PreflightVerdict:
    judged = [*_judge_inputs(measured), *_judge_rewards(measured)]
    findings = [finding for finding in judged if finding.level is not None]
    findings.sort(key=lambda finding: finding.level != "stops")
    if not findings:
        teaching = 1 - measured.equal
        words = f"this run can learn: {teaching:.0%} of the groups have something to compare"
        return PreflightVerdict(True, words, ())
    first = f"{findings[0].what}; {findings[0].mend}"
    if findings[0].level == "stops":
        words = f"this run will not learn: {first}"
        return PreflightVerdict(False, words, tuple(findings))
    count = "one thing" if len(findings) == 1 else f"{len(findings)} things"
    words = f"this run can learn, with {count} to mend first: {first}"
    return PreflightVerdict(True, words, tuple(findings))


def _level(value: float, warns: float, stops: float = float("inf")) -> Level | None:
    """Return the level of a value; NaN warns."""
    if value >= stops:
        return "stops"
    return None if value < warns else "warns"


def _judge_inputs(measured: PreflightMeasurements) -> Iterator[Finding]:
    prompts = measured.prompts
    needed = prompts.longest + measured.max_tokens
    yield Finding(
        "stops" if prompts.too_long else None,
        f"{prompts.too_long} of {prompts.rows} prompts are longer than the {prompts.room} tokens that fit beside a "
        f"completion; the longest, row {prompts.longest_row}, has {prompts.longest}",
        f"leave them out, lower --max-tokens, or --set engine.max_model_len={needed}",
    )
    longer = min(4 * measured.max_tokens, measured.context - prompts.longest)
    way_out = "ask for a shorter answer (--system-prompt), or raise engine.max_model_len"
    if longer > measured.max_tokens:
        way_out = f"--max-tokens {longer}"
    yield Finding(
        _level(measured.truncated, TRUNCATED_WARNS, TRUNCATED_STOPS),
        f"{measured.truncated:.0%} of the completions are cut off at {measured.max_tokens} tokens",
        way_out,
    )


def _judge_rewards(measured: PreflightMeasurements) -> Iterator[Finding]:
    judges = measured.judges
    rewards = measured.rewards
    if judges is not None:
        share = judges.unreadable / judges.calls
        yield Finding(
            _level(share, UNREADABLE_WARNS, UNREADABLE_STOPS),
            f"{share:.0%} of the judge's {judges.calls} answers hold no verdict that can be read",
            "give it more tokens, a larger model, or the `json` verdict, which the engine enforces",
        )
    problem = max(measured.problems, key=lambda name: measured.problems[name], default="")
    look = "mend the reward; see logs/rewards.log"
    if rewards:
        words = f"{measured.masked:.0%} of the completions could not be scored ({problem or 'no reason given'})"
        yield Finding(_level(measured.masked, MASKED_WARNS), words, look)
        yield _judge_equality(measured.equal, min(rewards), max(rewards))
    else:
        yield Finding(
            "stops",
            f"no completion could be scored ({problem or 'no reward gave a value'})",
            look,
        )
    yield Finding(
        "warns" if measured.reward_s > max(1.0, measured.generate_s) else None,
        f"scoring takes {measured.reward_s:.1f} s after {measured.generate_s:.1f} s of generating",
        "--set reward_workers.workers=4, or a faster reward",
    )


def _judge_equality(equal: float, low: float, high: float) -> Finding:
    """Judge the share of groups without a gradient: those whose rewards are all equal."""
    if equal < 1.0:
        return Finding(
            _level(equal, EQUAL_WARNS),
            f"{equal:.0%} of the groups have rewards that are all equal and teach nothing",
            f"keep dynamic sampling on (about {1 / (1 - equal):.0f} groups drawn for each kept), raise "
            "--group-size, or choose prompts of a fitting difficulty",
        )
    if low != high:
        return Finding(
            "stops",
            "rewards differ between prompts but in no group, so there is no gradient",
            "raise --temperature or --group-size, or check that the reward looks at the completion",
        )
    way_out = "the task may be solved already or the reward too lenient: take harder prompts or a stricter reward"
    if low == 0.0:
        way_out = "look at the completions below, then take easier prompts, another reward, or a --system-prompt"
    return Finding("stops", f"every reward is {low:g}, so there is no gradient", way_out)


if __name__ == "__main__":
    sys.exit(run_alone(_preflight))
