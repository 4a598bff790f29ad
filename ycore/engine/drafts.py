"""Speculative decoding (Leviathan et al., arXiv 2211.17192) with drafts that cost no model: tokens that followed the
same words before, in this completion or in others that the engine wrote.

vLLM checks a draft in one pass and keeps as much of it as the policy would have written, so the distribution of a
completion stays what it is; its tokens for a seed do not. Drafts are made only while they pay. `Pace` measures that for
each number of requests in flight: a pass over many requests is bound by arithmetic, and then a draft costs what it
saves. vLLM loads `Lookup` as its `custom_class` drafter.
"""

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

LEAST = 3  # tokens that must agree before a draft
_MOST = 16  # tokens that are compared
_PLACES = 4  # where the same tokens were seen last
_KEPT = 200_000  # distinct sequences of LEAST tokens that are remembered
_PROMPTS = 256  # the latest, each of which is remembered once

_LOOK = 4  # passes of a kind, whose median is compared with the other kind
_WEIGHT = 0.1  # of a pass in the running mean of the kind that was chosen
_PAYS = 0.95  # drafts must bring the cost below this share
_COST = 0.005  # share of the time that looks at the other kind may take
_LEAST_WAIT = 64  # passes between two looks


class Memory:
    """Where each sequence of `LEAST` tokens was seen last, and what followed."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._places: dict[tuple[int, ...], deque[tuple[list[int], int]]] = {}

    def add(self, text: list[int], tokens: Sequence[int]) -> None:
        """Append tokens to a text, which is remembered as far as it goes."""
        for token in tokens:
            if len(text) >= LEAST:
                key = tuple(text[-LEAST:])
                places = self._places.pop(
                    key, None
                )  # put back last: what was not seen for longest goes first
                self._places[key] = places = deque(maxlen=_PLACES) if places is None else places
                places.append((text, len(text)))
            text.append(token)
        while len(self._places) > self._kept:
            del self._places[next(iter(self._places))]

    def draft(self, text: Sequence[int], most: int) -> list[int]:
        """What followed the longest of the same endings, the latest of equals; at most `most` tokens."""
        best, longest = None, 0
        for there, at in reversed(self._places.get(tuple(text[-LEAST:]), ())):
            same = LEAST
            while (
                same < _MOST
                and same < min(at, len(text))
                and there[at - 1 - same] == text[-1 - same]
            ):
                same += 1
            if same > longest:
                best, longest = (there, at), same
        if best is None:
            return []
        there, at = best
        drafted = there[at : at + most]
        period = len(drafted)  # the text itself may end here: what repeats goes on repeating
        return drafted if there is not text else [drafted[place % period] for place in range(most)]


@dataclass(slots=True)
class _Costs:
    """Seconds of a token in passes with drafts and without, for one number of requests in flight."""

    means: dict[bool, float] = field(default_factory=dict)  # by whether drafts were checked
    looks: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    drafts: bool = False
    wait: float = 0  # passes until the next look

    @property
    def wants(self) -> bool:
        for kind in (True, False):
            if kind not in self.means:
                return kind
        return self.drafts == (self.wait > 0)

    def note(self, drafted: bool, seconds: float) -> None:
        if drafted in self.means and (self.wait > 0 or drafted == self.drafts):
            mean = self.means[drafted]
            # The machine's other work makes some passes long: none counts as more than three times the mean.
            self.means[drafted] = mean + _WEIGHT * (min(seconds, 3 * mean) - mean)
            self.wait -= 1
            return
        self.looks[drafted].append(seconds)
        if len(self.looks[drafted]) == _LOOK:
            self.means[drafted], self.looks[drafted] = median(self.looks[drafted]), []
            self._choose()

    def _choose(self) -> None:
        """What is faster, and when to look again: the more a look costs, the later."""
        if len(self.means) == 2:
            self.drafts = self.means[True] < _PAYS * self.means[False]
            loss = max(self.means.values()) / min(self.means.values()) - 1
            self.wait = max(_LEAST_WAIT, _LOOK * loss / _COST)


class Pace:
    """Whether drafts pay, for each number of requests in flight (1, 2, up to 4, up to 8, ...)."""

    def __init__(self) -> None:
        self._costs: defaultdict[int, _Costs] = defaultdict(_Costs)

    def wants(self, num_requests: int) -> bool:
        """Whether the next pass over so many requests should check drafts."""
        return self._costs[_size(num_requests)].wants

    def note(self, num_requests: int, *, drafted: bool, seconds: float) -> None:
        """A pass: its seconds for one token of each request."""
        self._costs[_size(num_requests)].note(drafted, seconds)

    def plain_s(self, num_requests: int) -> float | None:
        """Seconds of a pass without drafts; None before there were some."""
        return self._costs[_size(num_requests)].means.get(False)


def _size(num_requests: int) -> int:
    return max(0, num_requests - 1).bit_length()


class Drafted(NamedTuple):
    """Tokens that were drafted and accepted, the seconds of passes, and what they would have been without drafts."""

    tokens: float = 0
    accepted: float = 0
    seconds: float = 0
    plain_s: float = 0

    def __add__(self, other: "Drafted") -> "Drafted":  # type: ignore[override]
        return Drafted(*(one + another for one, another in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class _Pass:
    """Begun at `began` with rows of these lengths, and of the drafts that it checks, how many tokens each row has."""

    began: float
    lengths: tuple[int, ...]
    drafts: tuple[int, ...]


class Lookup:
    """vLLM's drafter. It sees rows of token ids, and not which request is in which row."""

    def __init__(self, vllm_config: Any) -> None:
        self._most: int = vllm_config.speculative_config.num_speculative_tokens
        self._limit: int = vllm_config.model_config.max_model_len
        self._memory, self._pace, self._counts = Memory(), Pace(), Drafted()
        self._texts: list[list[int]] = []  # of each row
        self._prompts: deque[int] = deque(maxlen=_PROMPTS)
        self._last: _Pass | None = None

    def load_model(self, *_: Any) -> None:
        """There is none."""

    def take(self) -> list[float]:
        """The fields of `Drafted` since the last call."""
        counts, self._counts = self._counts, Drafted()
        return list(counts)

    def propose(
        self,
        sampled: Sequence[Sequence[int]],
        lengths: Any,
        token_ids: Any,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """A draft for each row, [] for none. `sampled` is what the last pass gave each, `lengths` with it, and
        `token_ids` `[rows, T]`."""
        now = time.perf_counter()
        ends = tuple(int(lengths[row]) for row in range(len(sampled)))
        self._count(now, sampled, ends)
        drafts: list[list[int]] = [[] for _ in sampled]
        if self._pace.wants(len(ends)):  # else the texts wait too, since reading them takes time
            self._read(ends, token_ids)
            for row, (end, tokens) in enumerate(zip(ends, sampled, strict=True)):
                room = min(self._most, self._limit - end - 1)
                if tokens and room > 0:  # a row without tokens is still reading its prompt
                    drafts[row] = self._memory.draft(self._texts[row], room)
        self._last = _Pass(now, ends, tuple(map(len, drafts)))
        return drafts

    def _count(self, now: float, sampled: Sequence[Sequence[int]], ends: tuple[int, ...]) -> None:
        """What the last pass took and gave, where it went over the same rows and nothing else."""
        last, gained = self._last, [len(tokens) for tokens in sampled]
        begins = tuple(end - new for end, new in zip(ends, gained, strict=True))
        if last is None or begins != last.lengths or not all(gained) or not gained:
            return
        count, drafted, seconds = len(gained), any(last.drafts), now - last.began
        self._pace.note(count, drafted=drafted, seconds=seconds * count / sum(gained))
        if drafted:
            self._counts += Drafted(sum(last.drafts), sum(gained) - count)
        plain_s = seconds * count / sum(gained) if not drafted else self._pace.plain_s(count)
        if plain_s is not None:
            self._counts += Drafted(seconds=seconds, plain_s=plain_s * sum(gained) / count)

    def _read(self, ends: Sequence[int], token_ids: Any) -> None:
        """Grow each row's text by what is new. Rows change places, as requests end."""
        left = dict(enumerate(self._texts))

        def text_of(row: int, end: int) -> list[int]:
            for place in (row, *left):
                text = left.get(place)
                if text is not None and _goes_on(text, token_ids[row], end):
                    return left.pop(place)
            return self._new(token_ids[row, :end])

        self._texts = [text_of(row, end) for row, end in enumerate(ends)]
        for row, (end, text) in enumerate(zip(ends, self._texts, strict=True)):
            self._memory.add(text, token_ids[row, len(text) : end].tolist())

    def _new(self, ids: Any) -> list[int]:
        """A new request's text so far: nothing, or its prompt, where a sibling had the same."""
        prompt = hash(ids[:-1].tobytes())
        is_known = prompt in self._prompts
        self._prompts.append(prompt)
        return list(ids[:-1].tolist()) if is_known else []


def _goes_on(text: Sequence[int], ids: Any, end: int) -> bool:
    """Whether the row has this text, as far as its last tokens tell."""
    known = len(text)
    return known <= end and text[-_MOST:] == ids[max(0, known - _MOST) : known].tolist()
