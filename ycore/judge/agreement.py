"""A judge that is trained on pairs: `agrees:JUDGE.yaml` asks the policy the judge's question and reads its verdict.

The question is whole, with its code and marks, so that the trained model serves as this judge without a change. The
code can be learned: the question tells it, and a verdict copies it. It is no secret here, where nobody forges verdicts:
order, marks and code follow from the run's seed and the pair, so that each pair always has the same question.
The reward is whether the verdict is that of the pair, as in J1 (arXiv 2505.10320).
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ycore.config.schema import AGREES, RewardConfig, RunConfig
from ycore.data.prompts import PromptSet
from ycore.errors import ConfigError, RewardError
from ycore.judge.declaration import JsonVerdict, Judge, ScoreVerdict
from ycore.judge.question import Questioner, as_text, special_tokens, verdict_code
from ycore.judge.sources import is_agreement, judge_of
from ycore.judge.verdict import Reply, read_value
from ycore.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "verdict_key"
"""The column from which a question's order, marks and code follow."""


def agreement_of(spec: RewardConfig) -> Judge:
    """The judge of an `agrees:` reward; RewardError where its verdict on a pair is not in what it writes."""
    judge = judge_of(spec)
    if judge.mode != "pairwise" or not isinstance(judge.verdict, ScoreVerdict | JsonVerdict):
        raise RewardError(
            f"{AGREES} trains a judge that writes which of two answers is better; {spec.reward} is {judge.mode}, with "
            f"a verdict by {judge.verdict.kind}; say mode: pairwise, and verdict: {{kind: score}} or {{kind: json}}"
        )
    return judge


def trains_a_judge(config: RunConfig) -> bool:
    return any(map(is_agreement, config.rewards))


def check_agreement(config: RunConfig) -> None:
    """Raise ConfigError where the judge of the run's `agrees:` reward cannot be trained."""
    agreement_of(next(filter(is_agreement, config.rewards)))


def judge_questions(
    config: RunConfig, pairs: PromptSet, *, tokenizer: "PreTrainedTokenizerBase | None" = None
) -> PromptSet:
    """Replace each pair of the dataset by the question that the judge of the run's `agrees:` reward is asked about it.

    Special tokens of the policy's tokenizer are broken up in the pairs, as in `Questioner`.
    """
    spec = next(filter(is_agreement, config.rewards))
    judge = agreement_of(spec)
    if not {"chosen", "rejected"} <= set(pairs.columns):
        raise ConfigError(
            f"{spec.reward} reads the columns chosen and rejected; --answer-column is {config.answer_column} and "
            f"--prompt-column {config.prompt_column}; leave --answer-column out, and name another --prompt-column"
        )
    special = () if tokenizer is None else special_tokens(tokenizer)
    questions = Questions(pairs.prompts, Questioner(judge, special), seed=config.seed)
    return replace(pairs, prompts=questions, is_chat=True)


@dataclass(frozen=True, slots=True)
class Questions(Sequence[Prompt]):
    """The judge's question about each pair, with the better answer in the first place or the second, by chance."""

    pairs: Sequence[Prompt]
    questioner: Questioner
    seed: int

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: Any) -> Any:
        pair = self.pairs[index]
        answers = [str(pair.columns[name]) for name in ("chosen", "rejected")]
        identity = json.dumps([self.seed, as_text(pair.content), *answers])
        key = hashlib.sha256(identity.encode()).hexdigest()
        first, second = answers if shows_chosen_first(key) else answers[::-1]
        question = self.questioner.pairwise(pair, first, second, key=key)
        return replace(pair, content=question, columns={**pair.columns, KEY: key})


def shows_chosen_first(key: str) -> bool:
    """For half of all keys."""
    return hashlib.sha256(f"{key}\0order".encode()).digest()[0] % 2 == 0


def agreement(judge: Judge, key: str, text: str) -> float:
    """1 where the verdict prefers the chosen answer, 0 where the other, 0.5 in the middle; Unreadable without any."""
    share = judge.fraction(read_value(judge, Reply(text), code=verdict_code(key)))
    share = share if shows_chosen_first(key) else 1 - share
    return float(share > 0.5) if share != 0.5 else 0.5
