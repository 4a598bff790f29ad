"""Will this run learn anything, and if not, what to change: a verdict in words on what a preflight measured. Pure.

Not here: measuring (`roles.preflight`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["stops", "warns"]

NUM_PROMPTS = 16
"""That a preflight asks, each for a whole group of completions."""

TRUNCATED_STOPS, TRUNCATED_WARNS = 0.9, 0.25
EQUAL_WARNS = 0.75
UNREADABLE_STOPS, UNREADABLE_WARNS = 0.9, 0.1
MASKED_WARNS = 0.1
GAP_STOPS, GAP_WARNS = 0.5, 0.1
"""Mean absolute difference of a token's log-probability, engine against trainer; about 0.04 is bfloat16's rounding."""

_BINS = 10


@dataclass(frozen=True, slots=True)
class JudgeCount:
    """What judges were asked, all together, and how often no verdict could be read."""

    calls: int
    unreadable: int
    seconds: float = 0.0
    """Of one call."""


@dataclass(frozen=True, slots=True)
class PromptCount:
    """Lengths of every prompt of the dataset, in tokens as the engine gets them."""

    rows: int
    longest: int
    longest_row: int
    too_long: int
    """Prompts that leave no room for a completion."""

    room: int
    """Tokens that a prompt may have: the engine's context less the longest completion."""


@dataclass(frozen=True, slots=True)
class TemplateCheck:
    """What a conversation looks like once the chat template has written it; all fine where prompts are plain text."""

    problems: tuple[str, ...] = ()
    """Each a sentence's beginning: what is wrong with it."""

    end_of_turn: str | None = None
    """The token that the template ends an answer with, where that is none that ends a completion."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """What one preflight found. Shares are of completions, or of groups."""

    num_prompts: int
    group_size: int
    max_tokens: int
    context: int
    truncated: float
    """Share of completions cut off at `max_tokens`."""

    equal: float
    """Share of groups whose rewards are all equal."""

    rewards: tuple[float, ...]
    """Of every completion that was scored: the weighted sum of its sources."""

    masked: float
    """Share of completions that no source could score."""

    problems: Mapping[str, int] = field(default_factory=dict)
    means: Mapping[str, float | None] = field(default_factory=dict)
    """Of each reward source; None where it scored nothing."""

    generate_s: float = 0.0
    reward_s: float = 0.0
    """Seconds after the last completion of the round until all were scored."""

    mean_tokens: float = 0.0
    prompts: PromptCount | None = None
    template: TemplateCheck = TemplateCheck()
    judges: JudgeCount | None = None
    logprob_gap: float | None = None
    """Engine against trainer on the same weights; None where the trainer itself generates."""

    sync_gap: float | None = None
    stale_gap: float | None = None
    """After changed weights were sent: the engine against the changed model, and against the one before."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that stops learning or slows it, and what to change."""

    level: Level
    what: str
    mend: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """`learns` is False where anything was found that no training gets over."""

    learns: bool
    in_words: str
    findings: tuple[Finding, ...]

    @property
    def slowed(self) -> bool:
        return bool(self.findings)


def verdict(measured: Measurements) -> Verdict:
    """What the measurements mean, the worst first."""
    found = sorted(_findings(measured), key=lambda finding: finding.level != "stops")
    stops = [finding for finding in found if finding.level == "stops"]
    if stops:
        words = f"this run will not learn: {stops[0].what}; {stops[0].mend}"
    elif found:
        words = f"this run can learn, with {_count(found)} to mend first: {found[0].what}; {found[0].mend}"
    else:
        words = f"this run can learn: {1 - measured.equal:.0%} of the groups have something to compare"
    return Verdict(learns=not stops, in_words=words, findings=tuple(found))


def histogram(rewards: tuple[float, ...], *, bins: int = _BINS) -> list[tuple[float, float, int]]:
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


def from_json(told: Mapping[str, Any]) -> Measurements:
    """The measurements as `dataclasses.asdict` and JSON have carried them."""
    judges, prompts, template = told.get("judges"), told.get("prompts"), told.get("template") or {}
    return Measurements(
        **{key: value for key, value in told.items() if key not in ("judges", "prompts", "template", "rewards")},
        rewards=tuple(told["rewards"]),
        judges=None if judges is None else JudgeCount(**judges),
        prompts=None if prompts is None else PromptCount(**prompts),
        template=TemplateCheck(tuple(template.get("problems", ())), template.get("end_of_turn")),
    )


def _findings(measured: Measurements) -> Iterator[Finding]:
    yield from _of_prompts(measured)
    yield from _of_the_template(measured)
    yield from _of_the_engine(measured)
    yield from _of_truncation(measured)
    yield from _of_judges(measured)
    yield from _of_rewards(measured)
    yield from _of_time(measured)


def _of_prompts(measured: Measurements) -> Iterator[Finding]:
    prompts = measured.prompts
    if prompts is None or not prompts.too_long:
        return
    yield Finding(
        "stops",
        f"{prompts.too_long} of {prompts.rows} prompts are longer than the {prompts.room} tokens that fit beside a "
        f"completion; the longest, row {prompts.longest_row}, has {prompts.longest}",
        f"leave them out, lower --max-tokens, or --set engine.max_model_len={prompts.longest + measured.max_tokens}",
    )


def _of_the_template(measured: Measurements) -> Iterator[Finding]:
    for problem in measured.template.problems:
        yield Finding(
            "stops",
            f"the chat template is not this model's: {problem}",
            "put the model's own chat_template.jinja into its folder, or take an instruct model",
        )
    if measured.template.end_of_turn is not None:
        token = measured.template.end_of_turn
        yield Finding(
            "warns",
            f"the chat template ends an answer with {token!r}, and a completion does not end there",
            f"add {token!r} to eos_token_id in the model's generation_config.json",
        )


def _of_the_engine(measured: Measurements) -> Iterator[Finding]:
    gap, sent, stale = measured.logprob_gap, measured.sync_gap, measured.stale_gap
    if sent is not None and stale is not None and stale < sent:
        yield Finding(
            "stops",
            f"changed weights do not arrive in the engine: after a sync it is {sent:.2f} from the trainer's "
            f"log-probabilities and {stale:.2f} from those before",
            "check sync_weights, and that vLLM is the version that `ycore doctor` asks for",
        )
    if gap is None or gap < GAP_WARNS:
        return
    level: Level = "stops" if gap >= GAP_STOPS else "warns"
    yield Finding(
        level,
        f"engine and trainer differ by {gap:.2f} in a token's log-probability on the same weights",
        "give both the same dtype (--set dtype=float32), and see docs/algorithms.md on the correction",
    )


def _of_truncation(measured: Measurements) -> Iterator[Finding]:
    if measured.truncated < TRUNCATED_WARNS:
        return
    level: Level = "stops" if measured.truncated >= TRUNCATED_STOPS else "warns"
    longest_prompt = measured.prompts.longest if measured.prompts is not None else 0
    longer = min(4 * measured.max_tokens, max(measured.max_tokens, measured.context - longest_prompt))
    way_out = (
        f"--max-tokens {longer}"
        if longer > measured.max_tokens
        else "ask for a shorter answer (--system-prompt), or raise engine.max_model_len"
    )
    yield Finding(
        level, f"{measured.truncated:.0%} of the completions are cut off at {measured.max_tokens} tokens", way_out
    )


def _of_judges(measured: Measurements) -> Iterator[Finding]:
    judges = measured.judges
    if judges is None or not judges.calls:
        return
    share = judges.unreadable / judges.calls
    if share < UNREADABLE_WARNS:
        return
    level: Level = "stops" if share >= UNREADABLE_STOPS else "warns"
    yield Finding(
        level,
        f"{share:.0%} of the judge's {judges.calls} answers hold no verdict that can be read",
        "give it more tokens, a larger model, or the `json` verdict, which the engine enforces",
    )


def _of_rewards(measured: Measurements) -> Iterator[Finding]:
    if not measured.rewards:
        problem = max(measured.problems, key=lambda name: measured.problems[name], default="no reward gave a value")
        yield Finding("stops", f"no completion could be scored ({problem})", "mend the reward; see logs/rewards.log")
        return
    if measured.masked >= MASKED_WARNS:
        problem = max(measured.problems, key=lambda name: measured.problems[name], default="no reason given")
        yield Finding(
            "warns",
            f"{measured.masked:.0%} of the completions could not be scored ({problem})",
            "mend the reward; see logs/rewards.log",
        )
    if measured.equal == 1.0:
        yield _nothing_to_compare(measured)
    elif measured.equal >= EQUAL_WARNS:
        yield Finding(
            "warns",
            f"{measured.equal:.0%} of the groups have rewards that are all equal and teach nothing",
            f"keep dynamic sampling on (about {1 / (1 - measured.equal):.0f} groups drawn for each kept), raise "
            "--group-size, or choose prompts of a fitting difficulty",
        )


def _nothing_to_compare(measured: Measurements) -> Finding:
    low, high = min(measured.rewards), max(measured.rewards)
    if low == high == 0.0:
        what = "every reward is 0, so there is no gradient"
        mend = "look at the completions below, then take easier prompts, another reward, or a --system-prompt"
    elif low == high:
        what = f"every reward is {low:g}, so there is no gradient"
        mend = "the task may be solved already or the reward too lenient: take harder prompts or a stricter reward"
    else:
        what = "rewards differ between prompts but in no group, so there is no gradient"
        mend = "raise --temperature or --group-size, or check that the reward looks at the completion"
    return Finding("stops", what, mend)


def _of_time(measured: Measurements) -> Iterator[Finding]:
    if measured.reward_s > max(1.0, measured.generate_s):
        yield Finding(
            "warns",
            f"scoring takes {measured.reward_s:.1f} s after {measured.generate_s:.1f} s of generating",
            "--set reward_workers.workers=4, or a faster reward",
        )


def _count(found: list[Finding]) -> str:
    return "one thing" if len(found) == 1 else f"{len(found)} things"
