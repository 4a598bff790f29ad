"""From a run's configuration to its Scoring: the reward workers, judges and reward models of this rank.

Not here: starting engines (`launch`), and what a scorer does (`scoring`, `judge_scorer`, `reward_model_scorer`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ycore.config.run import RewardConfig, RunConfig
from ycore.controller.judge_scorer import JudgeScorer
from ycore.controller.meters import JudgeMeter, Meter, RewardModelMeter, WorkerMeter
from ycore.controller.reference_scorer import ReferenceScorer
from ycore.controller.reward_model_scorer import Encode, RewardModelScorer
from ycore.controller.scoring import RuleScorer, Scorer, Scoring, TextOf, as_content, plain_text
from ycore.judging.escaping import without_special_tokens
from ycore.judging.loading import is_judge, is_reward_model, is_rule, judge_of, reward_model_of
from ycore.judging.prompt import Questioner
from ycore.rewards.loading import reward_names
from ycore.rewards.pool import RewardPool
from ycore.rewards.reference import is_reference, reference_of
from ycore.rewards.text import without_thinking
from ycore.roles.engine import Engine
from ycore.roles.judge_address import RemoteJudge
from ycore.roles.judge_engine import JudgeEngine, LocalJudge
from ycore.roles.ranks import this_rank
from ycore.roles.reward_model_engine import VllmRewardModel
from ycore.roles.server import Server, restart_timeout_s
from ycore.run_folder.paths import RunFolder
from ycore.types import Completion, Prompt


@dataclass(frozen=True, slots=True)
class ScorerEngines:
    """One model that scores: the reward sources it serves, and its engines, slot by slot."""

    role: str
    sources: Sequence[int]
    engines: Sequence[str]
    model: Path
    max_model_len: int


def build_scoring(
    config: RunConfig, folder: RunFolder, started: Sequence[ScorerEngines], *, policy: "Policy | None" = None
) -> Scoring:
    """Every reward source of the run, ready to be started, with the engines of this rank's own slots."""
    builder = _Builder(config, folder, {source: one for one in started for source in one.sources})
    rules = [source for source, spec in enumerate(config.rewards) if is_rule(spec) and not is_reference(spec)]
    scorers: list[tuple[Sequence[int], Scorer]] = []
    if rules:
        scorers.append((rules, builder.rules([config.rewards[source] for source in rules])))
    for source, spec in enumerate(config.rewards):
        if is_judge(spec):
            scorers.append(((source,), builder.judge(source, spec)))
        elif is_reward_model(spec):
            scorers.append(((source,), builder.reward_model(source, spec)))
        elif is_reference(spec) and policy is not None:
            scorers.append(((source,), policy.scorer(spec)))
    return Scoring(scorers, builder.meters())


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy itself, for the reward that asks it: its engines on this rank's slots, and its tokenizer."""

    engines: Sequence[Engine]
    tokenizer: PreTrainedTokenizerBase
    max_model_len: int

    def scorer(self, spec: RewardConfig) -> ReferenceScorer:
        def tokenize(text: str) -> list[int]:
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

        return ReferenceScorer(reference_of(spec), self.engines, tokenize=tokenize, max_model_len=self.max_model_len)


class _Builder:
    """What all scorers of a run share."""

    def __init__(self, config: RunConfig, folder: RunFolder, started: Mapping[int, ScorerEngines]) -> None:
        self._config = config
        self._folder = folder
        self._started = started
        self._names = reward_names(config.rewards)
        self._judges: JudgeMeter | None = None
        self._reward_models: RewardModelMeter | None = None
        self._workers: WorkerMeter | None = None

    def meters(self) -> list[Meter]:
        found: list[Meter | None] = [self._judges, self._reward_models, self._workers]
        return [meter for meter in found if meter is not None]

    def rules(self, specs: Sequence[RewardConfig]) -> RuleScorer:
        config, folder = self._config, self._folder
        log = folder.log("rewards")
        pool = RewardPool(specs, settings=config.reward_workers, log=log, run_id=folder.run_id)
        self._workers = WorkerMeter(lambda: pool.restarts)
        return RuleScorer(pool)

    def judge(self, source: int, spec: RewardConfig) -> JudgeScorer:
        name, judge, timeout_s = self._names[source], judge_of(spec), self._config.engine.request_timeout_s
        self._judges = self._judges or JudgeMeter()
        engines: list[JudgeEngine]
        special: tuple[str, ...] = ()
        if judge.base_url is not None:
            engines = [RemoteJudge(name, judge, request_timeout_s=timeout_s)]
        else:
            engines = [LocalJudge(server) for server in self._servers(source)]
            special = special_tokens(self._tokenizer(source))
        questioner = Questioner(judge, special)
        return JudgeScorer(name, questioner, engines, meter=self._judges, seed=self._config.seed, text_of=text_of(spec))

    def reward_model(self, source: int, spec: RewardConfig) -> RewardModelScorer:
        self._reward_models = self._reward_models or RewardModelMeter()
        return RewardModelScorer(
            self._names[source],
            reward_model_of(spec),
            [VllmRewardModel(server) for server in self._servers(source)],
            encode=reward_model_encoder(self._tokenizer(source)),
            max_model_len=self._started[source].max_model_len,
            meter=self._reward_models,
            text_of=text_of(spec),
        )

    def _servers(self, source: int) -> list[Server]:
        return scorer_servers(self._config, self._folder, self._started[source])

    def _tokenizer(self, source: int) -> PreTrainedTokenizerBase:
        model, trusts = self._started[source].model, self._config.trust_remote_code
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model, trust_remote_code=trusts)
        return tokenizer


def scorer_servers(config: RunConfig, folder: RunFolder, started: ScorerEngines) -> list[Server]:
    """One model's servers on this rank's slots, which are the node's in turn, as its rollout engines are."""
    rank, settings = this_rank(), config.engine
    return [
        Server(
            name,
            folder.socket(name),
            request_timeout_s=settings.request_timeout_s,
            restart_timeout_s=restart_timeout_s(settings),
        )
        for name in started.engines[rank.local :: rank.local_world]
    ]


def text_of(spec: RewardConfig) -> TextOf:
    """What a source looks at: all of a completion, or what follows its thinking."""
    return _after_thinking if spec.strip_thinking else plain_text


def _after_thinking(completion: Completion) -> str:
    return str(without_thinking(completion.text))


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Every text that this tokenizer would read as one of its special tokens."""
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return tuple({*added, *tokenizer.all_special_tokens})


def reward_model_encoder(tokenizer: PreTrainedTokenizerBase) -> Encode:
    """Prompt and completion as TRL's trainers show them to a reward model.

    A chat goes through the reward model's own chat template; a text is followed by the end token, as it is in
    TRL's RewardTrainer. What the policy wrote cannot spell the tokens that end its turn.
    """
    special = special_tokens(tokenizer)

    def encode(prompt: Prompt, completion: str) -> list[int]:
        written = without_special_tokens(completion, special)
        if isinstance(prompt.content, str):
            text = prompt.content + written
            end = str(tokenizer.eos_token or "")
            text = text if end and text.endswith(end) else text + end
        else:
            answer = as_content(written, chat=True)
            assert isinstance(answer, list)
            text = str(tokenizer.apply_chat_template([*prompt.content, *answer], tokenize=False))
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return encode
