"""Will this run learn anything, and if not, what to change: a verdict in words on what a preflight measured."""

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
GAP_STOPS, GAP_WARNS = 0.5, 0.1  # of a token's log-probability; about 0.04 is bfloat16's rounding


@dataclass(frozen=True, slots=True)
class JudgeCount:
    calls: int  # requests to all judges
    unreadable: int  # answers without a verdict that can be read
    seconds: float = 0.0  # mean of one call


@dataclass(frozen=True, slots=True)
class PromptCount:
    """Lengths of all prompts of the dataset, in tokens as the engine gets them."""

    rows: int
    longest: int
    longest_row: int
    too_long: int  # prompts that leave no room for a completion
    room: int  # tokens that a prompt may have: the engine's context minus the longest completion


@dataclass(frozen=True, slots=True)
class TemplateCheck:
    """What is wrong with the conversations that the chat template writes; nothing where prompts are plain text."""

    problems: tuple[str, ...] = ()
    end_of_turn: str | None = (
        None  # the token that ends an answer in the template, where it does not end a completion
    )


@dataclass(frozen=True, slots=True)
class Measurements:
    num_prompts: int
    group_size: int
    max_tokens: int
    context: int
    truncated: float  # share of completions cut off at `max_tokens`
    equal: float  # share of groups whose rewards are all equal
    rewards: tuple[float, ...]  # of every scored completion: the weighted sum of its sources
    masked: float  # share of completions that no source could score
    problems: Mapping[str, int] = field(
        default_factory=dict
    )  # how often each problem kept a source from scoring
    means: Mapping[str, float | None] = field(default_factory=dict)
    """Mean of each reward source; None where it scored nothing."""
    generate_s: float = 0.0
    reward_s: float = 0.0  # seconds from the last completion of the round until all were scored
    mean_tokens: float = 0.0
    prompts: PromptCount | None = None
    template: TemplateCheck = TemplateCheck()
    judges: JudgeCount | None = None
    logprob_gap: float | None = None
    """Mean absolute difference of a token's log-probability, engine against trainer, on the same weights; None where
    the trainer itself generates."""

    gap_spread: float = 0.0  # standard deviation of that difference, signed
    weight_limit: float | None = (
        None  # of a whole completion's weight, beyond which it is left out; None: no such mask
    )
    sync_gap: float | None = None
    stale_gap: float | None = None
    """The same after changed weights were sent: the engine against the changed model, and against the one before."""


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    what: str
    mend: str


@dataclass(frozen=True, slots=True)
class Verdict:
    learns: bool  # False where a finding stops learning
    in_words: str
    findings: tuple[Finding, ...]  # worst first


def verdict(measured: Measurements) -> Verdict:
    rules = [*_input_rules(measured), *_engine_rules(measured), *_reward_rules(measured)]
    found = [Finding(level, what, mend) for level, what, mend in rules if level is not None]
    found.sort(key=lambda finding: finding.level != "stops")
    learns = not any(finding.level == "stops" for finding in found)
    if not found:
        words = (
            f"this run can learn: {1 - measured.equal:.0%} of the groups have something to compare"
        )
    elif learns:
        count = "one thing" if len(found) == 1 else f"{len(found)} things"
        words = f"this run can learn, with {count} to mend first: {found[0].what}; {found[0].mend}"
    else:
        words = f"this run will not learn: {found[0].what}; {found[0].mend}"
    return Verdict(learns, words, tuple(found))


def from_json(preflight: Mapping[str, Any]) -> Measurements:
    """The measurements of a preflight.json, which has them as `dataclasses.asdict` gives them."""
    return TypeAdapter(Measurements).validate_python(preflight)


def histogram(rewards: tuple[float, ...], *, bins: int = 10) -> list[tuple[float, float, int]]:
    """Low edge, high edge and count of each bin; one bin where all rewards are equal."""
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
    """The share of the gradient that is left where completions of a weight above `limit` are left out.

    The log-ratios of a token have this standard deviation and are independent, and the mean weight is 1: a
    completion's weight w is log-normal, of deviation s = spread * sqrt(tokens), and E[w; w <= limit] is
    Phi(log(limit) / s - s / 2). So longer completions lose more.
    """
    deviation = spread * math.sqrt(tokens)
    return NormalDist().cdf(math.log(limit) / deviation - deviation / 2) if deviation > 0 else 1.0


_Rule = tuple[Level | None, str, str]
"""A finding's level, what was found, and what to change; None where the measurement is fine."""


def _level(value: float, warns: float, stops: float = float("inf")) -> Level | None:
    """NaN warns."""
    return "stops" if value >= stops else None if value < warns else "warns"


def _input_rules(measured: Measurements) -> Iterator[_Rule]:
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


def _engine_rules(measured: Measurements) -> Iterator[_Rule]:
    gap, sent, stale = measured.logprob_gap or 0.0, measured.sync_gap, measured.stale_gap
    if sent is not None and stale is not None:
        yield (
            "stops" if stale < sent else None,
            f"changed weights do not arrive in the engine: after a sync it is {sent:.2f} from the trainer's "
            f"log-probabilities and {stale:.2f} from those before",
            "check sync_every, and that vLLM is the version that `ycore doctor` asks for",
        )
    yield (
        _level(gap, GAP_WARNS, GAP_STOPS),
        f"engine and trainer differ by {gap:.2f} in a token's log-probability on the same weights",
        "give both the same dtype (--set dtype=float32), and see docs/algorithms.md on the correction",
    )
    if measured.weight_limit is not None:
        sizes = (measured.mean_tokens, measured.max_tokens)
        kept, of_longest = (
            kept_share(measured.gap_spread, tokens=size, limit=measured.weight_limit)
            for size in sizes
        )
        yield (
            None if kept >= KEPT_WARNS else "warns",
            f"a completion of {sizes[0]:.0f} tokens keeps {kept:.0%} of its gradient, and one of {sizes[1]} keeps "
            f"{of_longest:.0%}: TRL's sequence_mask leaves out those whose weight against the engine is above "
            f"{measured.weight_limit:g}, and so rather the long ones",
            "--vllm-importance-sampling-mode token_truncate, or --trust-region dppo-tv",
        )
    longest_prompt = 0 if measured.prompts is None else measured.prompts.longest
    longer = min(4 * measured.max_tokens, measured.context - longest_prompt)
    yield (
        _level(measured.truncated, TRUNCATED_WARNS, TRUNCATED_STOPS),
        f"{measured.truncated:.0%} of the completions are cut off at {measured.max_tokens} tokens",
        f"--max-tokens {longer}"
        if longer > measured.max_tokens
        else "ask for a shorter answer (--system-prompt), or raise engine.max_model_len",
    )


def _reward_rules(measured: Measurements) -> Iterator[_Rule]:
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
    """Groups whose rewards are all equal have no gradient."""
    if equal < 1.0:
        return (
            _level(equal, EQUAL_WARNS),
            f"{equal:.0%} of the groups have rewards that are all equal and teach nothing",
            f"keep dynamic sampling on (about {1 / (1 - equal):.0f} groups drawn for each kept), raise "
            "--group-size, or choose prompts of a fitting difficulty",
        )
    if low != high:
        what = "rewards differ between prompts but in no group, so there is no gradient"
        return (
            "stops",
            what,
            "raise --temperature or --group-size, or check that the reward looks at the completion",
        )
    if low == 0.0:
        way_out = "look at the completions below, then take easier prompts, another reward, or a --system-prompt"
    else:
        way_out = "the task may be solved already or the reward too lenient: take harder prompts or a stricter reward"
    return "stops", f"every reward is {low:g}, so there is no gradient", way_out
