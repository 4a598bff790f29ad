"""The values that pass between rooms: frozen, typed, standard library only.

Axes, as suffixes of names: `_P` prompts of a round, `_G` completions of a group, `_R` reward sources, `_T` tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, str]
"""One chat turn: `{"role": ..., "content": ...}`."""

Content = str | list[Message]
"""A prompt or a completion as a person sees it: plain text, or chat turns."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the dataset, ready for the policy: `Prompt(row=3, content="2 + 2?", columns={"answer": "4"})`."""

    row: int
    content: Content
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.content, str)


@dataclass(frozen=True, slots=True)
class Draw:
    """A prompt at its place in the run's order: `position` counts every prompt ever drawn."""

    position: int
    prompt: Prompt
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """What the policy wrote in answer to one prompt.

    `logprobs` are of its tokens under the distribution that was sampled (after temperature and truncation); None where
    the engine shares the trainer's weights.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    text: str
    finish_reason: str
    policy_version: int


@dataclass(frozen=True, slots=True)
class Score:
    """One reward source's answer for one completion; `value` None means masked, and `problem` says why."""

    value: float | None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """The completions of one prompt, scored: `scores_GR[g][r]` is reward source `r` on completion `g`.

    `greedy_scores_R` are those of the prompt's greedy completion, which is a baseline and is not trained on; None
    where the run has no such baseline.
    """

    draw: Draw
    completions: tuple[Completion, ...]
    scores_GR: tuple[tuple[Score, ...], ...]
    greedy_scores_R: tuple[Score, ...] | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)


@dataclass(frozen=True, slots=True)
class Finished:
    """A scored group; `teaches` says whether its rewards give a gradient."""

    group: Group
    teaches: bool
