"""Judge what a preflight measured: will this run learn anything, and if not, what to change."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, Literal

from pydantic import TypeAdapter

Level = Literal["stops", "warns"]

NUM_PROMPTS = 16  # prompts of a preflight, each for a whole group of completions
TRUNCATED_STOPS, TRUNCATED_WARNS = 0.9, 0.25
EQUAL_WARNS = 0.75
UNREADABLE_STOPS, UNREADABLE_WARNS = 0.9, 0.1
MASKED_WARNS = 0.1
KEPT_WARNS = 0.9  # of the gradient that the limit of whole completions' weights keeps
GAP_STOPS, GAP_WARNS = (
    0.5,
    0.1,
)  # of a token's log-probability; about 0.04 is bfloat16's rounding


@dataclass(frozen=True, slots=True)
class JudgeCalls:
    """Requests to all judges, answers whose verdict cannot be read, and the mean seconds of a call."""

    calls: int
    unreadable: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class TemplateCheck:
    """Problems of the conversations that the chat template writes; none where prompts are plain text.

    Attributes:
        end_of_turn: the token that ends an answer in the template, where it does not end a completion.
    """

    problems: tuple[str, ...] = ()
    end_of_turn: str | None = None


@dataclass(frozen=True, slots=True)
class PreflightMeasurements:
    """Results of a preflight's round.

    Attributes:
        truncated: share of completions cut off at `max_tokens`.
        equal: share of groups whose rewards are all equal.
        rewards: the weighted sum of its sources, of every scored completion.
        masked: share of completions that no source could score.
        problems: how often each problem kept a source from scoring.
        means: mean of each reward source; None where it scored nothing.
        reward_s: seconds from the last completion of the round until all were scored.
        logprob_gap: mean absolute difference of a token's log-probability, engine against trainer, on the same
            weights; None where the trainer itself generates. `gap_spread` is the standard deviation, signed.
        weight_limit: a whole completion's importance weight, beyond which it is left out; None without such a mask.
    """

    num_prompts: int
    group_size: int
    max_tokens: int
    context: int
    truncated: float
    equal: float
    rewards: tuple[float, ...]
    masked: float
    problems: Mapping[str, int] = field(default_factory=dict)
    means: Mapping[str, float | None] = field(default_factory=dict)
    generate_s: float = 0.0
    reward_s: float = 0.0
    mean_tokens: float = 0.0
    prompts: PromptLengths | None = None
    template: TemplateCheck = TemplateCheck()
    judges: JudgeCalls | None = None
    logprob_gap: float | None = None
    gap_spread: float = 0.0
    weight_limit: float | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    what: str
    mend: str


@dataclass(frozen=True, slots=True)
class PreflightVerdict:
    """`learns` is False where a finding stops learning; findings come worst first."""

    learns: bool
    in_words: str
    findings: tuple[Finding, ...]


def preflight_verdict(measured: PreflightMeasurements) -> PreflightVerdict:
    rules = [*_input_rules(measured), *_engine_rules(measured), *_reward_rules(measured)]
    findings = [Finding(level, what, mend) for level, what, mend in rules if level is not None]
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


def parse_measurements(preflight: Mapping[str, Any]) -> PreflightMeasurements:
    """Read the measurements of a preflight.json, which has them as `dataclasses.asdict` gives them."""
    return TypeAdapter(PreflightMeasurements).validate_python(preflight)


def histogram(rewards: tuple[float, ...], *, bins: int = 10) -> list[tuple[float, float, int]]:
    """Return low edge, high edge and count of each bin; one bin where all rewards are equal."""
    if not rewards:
        return []
    low, high = min(rewards), max(rewards)
    if low == high:
        return [(low, high, len(rewards))]
    width = (high - low) / bins
    counts = [0] * bins
    for reward in rewards:
        counts[min(bins - 1, int((reward - low) / width))] += 1
    return [(low + k * width, low + (k + 1) * width, count) for k, count in enumerate(counts)]


def kept_share(spread: float, *, tokens: float, limit: float) -> float:
    """Return the share of the gradient that is left where completions of a weight above `limit` are left out.

    The log-ratios of a token have this standard deviation and are independent, and the mean weight is 1: a
    completion's weight w is log-normal, of deviation s = spread * sqrt(tokens), and E[w; w <= limit] is
    Phi(log(limit) / s - s / 2). So longer completions lose more.
    """
    deviation = spread * math.sqrt(tokens)
    return (
        NormalDist().cdf(math.log(limit) / deviation - deviation / 2) if deviation > 0 else 1.0
    )


_Rule = tuple[Level | None, str, str]
"""A finding's level, what was found, and what to change; None where the measurement is fine."""


def _level(value: float, warns: float, stops: float = float("inf")) -> Level | None:
    """Return the level of a value; NaN warns."""
    if value >= stops:
        return "stops"
    return None if value < warns else "warns"


def _input_rules(measured: PreflightMeasurements) -> Iterator[_Rule]:
    prompts, template = measured.prompts, measured.template
    if prompts is not None:
        needed = prompts.longest + measured.max_tokens
        yield (
            "stops" if prompts.too_long else None,
            f"{prompts.too_long} of {prompts.rows} prompts are longer than the {prompts.room} tokens that fit beside a "
            f"completion; the longest, row {prompts.longest_row}, has {prompts.longest}",
            f"leave them out, lower --max-tokens, or --set engine.max_model_len={needed}",
        )
    for problem in template.problems:
        yield (
            "stops",
            f"the chat template is not this model's: {problem}",
            "put the model's own chat_template.jinja into its folder, or take an instruct model",
        )
    yield (
        None if template.end_of_turn is None else "warns",
        f"the chat template ends an answer with {template.end_of_turn!r}, and a completion does not end there",
        f"add {template.end_of_turn!r} to eos_token_id in the model's generation_config.json",
    )


def _engine_rules(measured: PreflightMeasurements) -> Iterator[_Rule]:
    gap = measured.logprob_gap or 0.0
    yield (
        _level(gap, GAP_WARNS, GAP_STOPS),
        f"engine and trainer differ by {gap:.2f} in a token's log-probability on the same weights",
        "give both the same dtype (--set dtype=float32), and see docs/algorithms.md on the correction",
    )
    if measured.weight_limit is not None:
        mean_tokens, max_tokens = measured.mean_tokens, measured.max_tokens
        spread, limit = measured.gap_spread, measured.weight_limit
        kept = kept_share(spread, tokens=mean_tokens, limit=limit)
        kept_of_longest = kept_share(spread, tokens=max_tokens, limit=limit)
        yield (
            None if kept >= KEPT_WARNS else "warns",
            f"a completion of {mean_tokens:.0f} tokens keeps {kept:.0%} of its gradient, and one of {max_tokens} keeps "
            f"{kept_of_longest:.0%}: TRL's sequence_mask leaves out those whose weight against the engine is above "
            f"{limit:g}, and so rather the long ones",
            "--vllm-importance-sampling-mode token_truncate, or --trust-region dppo-tv",
        )
    longest_prompt = 0 if measured.prompts is None else measured.prompts.longest
    longer = min(4 * measured.max_tokens, measured.context - longest_prompt)
    way_out = "ask for a shorter answer (--system-prompt), or raise engine.max_model_len"
    if longer > measured.max_tokens:
        way_out = f"--max-tokens {longer}"
    yield (
        _level(measured.truncated, TRUNCATED_WARNS, TRUNCATED_STOPS),
        f"{measured.truncated:.0%} of the completions are cut off at {measured.max_tokens} tokens",
        way_out,
    )


def _reward_rules(measured: PreflightMeasurements) -> Iterator[_Rule]:
    judges, rewards = measured.judges, measured.rewards
    if judges is not None and judges.calls:
        share = judges.unreadable / judges.calls
        yield (
            _level(share, UNREADABLE_WARNS, UNREADABLE_STOPS),
            f"{share:.0%} of the judge's {judges.calls} answers hold no verdict that can be read",
            "give it more tokens, a larger model, or the `json` verdict, which the engine enforces",
        )
    problem = max(measured.problems, key=lambda name: measured.problems[name], default="")
    look = "mend the reward; see logs/rewards.log"
    if rewards:
        words = f"{measured.masked:.0%} of the completions could not be scored ({problem or 'no reason given'})"
        yield _level(measured.masked, MASKED_WARNS), words, look
        yield _equal_rule(measured.equal, min(rewards), max(rewards))
    else:
        yield (
            "stops",
            f"no completion could be scored ({problem or 'no reward gave a value'})",
            look,
        )
    yield (
        "warns" if measured.reward_s > max(1.0, measured.generate_s) else None,
        f"scoring takes {measured.reward_s:.1f} s after {measured.generate_s:.1f} s of generating",
        "--set reward_workers.workers=4, or a faster reward",
    )


def _equal_rule(equal: float, low: float, high: float) -> _Rule:
    """Judge the share of groups without a gradient: those whose rewards are all equal."""
    if equal < 1.0:
        return (
            _level(equal, EQUAL_WARNS),
            f"{equal:.0%} of the groups have rewards that are all equal and teach nothing",
            f"keep dynamic sampling on (about {1 / (1 - equal):.0f} groups drawn for each kept), raise "
            "--group-size, or choose prompts of a fitting difficulty",
        )
    if low != high:
        return (
            "stops",
            "rewards differ between prompts but in no group, so there is no gradient",
            "raise --temperature or --group-size, or check that the reward looks at the completion",
        )
    way_out = "the task may be solved already or the reward too lenient: take harder prompts or a stricter reward"
    if low == 0.0:
        way_out = "look at the completions below, then take easier prompts, another reward, or a --system-prompt"
    return "stops", f"every reward is {low:g}, so there is no gradient", way_out
