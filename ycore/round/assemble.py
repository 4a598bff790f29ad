"""From a run's folder to the parts its controller works with: prompts, engines, reward workers.

Not here: a trainer (`roles.trainer`) or a table of results (`roles.evaluator`), which both start from these.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from ycore.config.schema import RunConfig
from ycore.data.prompts import PromptSet, load_prompts
from ycore.engine import Engine, Sampling
from ycore.engine.server import restart_timeout_s
from ycore.engine.vllm_engine import VllmEngine
from ycore.round.round import Rules
from ycore.round.sampling import WHOLE, DrawSource, Shard
from ycore.round.scorers import Policy, ScorerEngines, build_scoring, scorer_servers
from ycore.round.scoring import Scoring
from ycore.round.slots import Sleeper, slot_sleepers
from ycore.run.files import read_json
from ycore.run.paths import RunFolder
from ycore.run.secrets import load_config
from ycore.types import Prompt


@dataclass(frozen=True, slots=True)
class EngineList:
    """What the launcher has started, as it wrote it down in `engines.json`."""

    kind: str
    engines: Sequence[str]
    model: Path
    max_model_len: int
    home: Path | None = None
    """The whole run's folder, where this one is that of a machine which is not the first."""

    max_num_seqs: int | None = None
    """Completions that one engine writes at once."""

    scorers: Sequence[ScorerEngines] = ()
    """The engines of judges and reward models."""

    sleeps: bool = False
    """Whether they share devices with the trainer, and sleep while others have them."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """The parts."""

    folder: RunFolder
    config: RunConfig
    started: EngineList
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSet

    @property
    def home(self) -> RunFolder:
        """Where checkpoints, metrics and the model go, whichever machine this is."""
        return self.folder if self.started.home is None else RunFolder(self.started.home)

    @property
    def max_prompt_tokens(self) -> int:
        return self.started.max_model_len - self.config.max_tokens

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's token ids: through the chat template for chats, as it stands for text."""
        if isinstance(prompt.content, str):
            return tuple(self.tokenizer(prompt.content)["input_ids"])
        template_arguments = self.config.trl.get("chat_template_kwargs") or {}
        ids = self.tokenizer.apply_chat_template(
            prompt.content, add_generation_prompt=True, tokenize=True, return_dict=False, **template_arguments
        )
        return tuple(ids)

    def sampling(self) -> Sampling:
        """How completions are drawn: the run's sizes, TRL's fields of generation, every end token of the model."""
        trl = self.config.trl
        return Sampling(
            max_tokens=self.config.max_tokens,
            temperature=trl.get("temperature", 1.0),
            top_p=trl.get("top_p", 1.0),
            top_k=trl.get("top_k", 0),
            min_p=trl.get("min_p") or 0.0,
            repetition_penalty=trl.get("repetition_penalty", 1.0),
            stop_token_ids=end_tokens(self.started.model, self.tokenizer),
        )

    def draws(self, shard: Shard = WHOLE) -> DrawSource:
        """A rank's prompts in the run's order; in file order for an evaluation, which asks each once."""
        return DrawSource(
            self.prompts.prompts,
            seed=self.config.seed if self.config.algorithm != "eval" else None,
            encode=self.encode,
            max_prompt_tokens=self.max_prompt_tokens,
            shard=shard,
        )

    def rules(self, *, num_engines: int = 1) -> Rules:
        """How a round decides, on a rank with so many engines; an evaluation takes every group as it comes."""
        config, evaluates = self.config, self.config.algorithm == "eval"
        group_size = config.num_samples if evaluates else config.group_size
        at_once = self.started.max_num_seqs
        return Rules(
            group_size=group_size,
            seed=config.seed,
            reward_weights=tuple(reward.weight for reward in config.rewards),
            dynamic=config.sampling.dynamic and not evaluates,
            max_tries=config.sampling.max_tries,
            greedy_baseline=config.advantage == "remax" and not evaluates,
            # One more than fits, so that no engine waits for the controller to notice that a group has ended.
            max_in_flight=None if at_once is None else math.ceil(at_once * num_engines / group_size) + 1,
        )

    def vllm_engines(self) -> list[Engine]:
        settings = self.config.engine
        return [
            VllmEngine(
                name,
                self.folder.socket(name),
                self.sampling(),
                request_timeout_s=settings.request_timeout_s,
                restart_timeout_s=restart_timeout_s(settings),
                sleeps=self.started.sleeps,
            )
            for name in self.started.engines
        ]

    def sleepers(self, engines: Sequence[Engine]) -> Mapping[str, Sequence[Sleeper]] | None:
        """The engines of this rank's slots that take turns on a device, `engines` those of the policy; else None."""
        if not self.started.sleeps:
            return None
        scorers = [(one.role, scorer_servers(self.config, self.folder, one)) for one in self.started.scorers]
        return slot_sleepers(self.folder, engines, scorers)

    def scoring(self, engines: Sequence[Engine] = ()) -> Scoring:
        """Every reward source of the run, ready to be started; `engines` are the policy's, on this rank's slots."""
        policy = Policy(engines, self.tokenizer, self.started.max_model_len)
        return build_scoring(self.config, self.folder, self.started.scorers, policy=policy)


def assemble(root: Path) -> Assembly:
    """Read what the launcher wrote, and load tokenizer and prompts."""
    folder = RunFolder(root)
    config = RunConfig.model_validate(load_config(folder))
    started = _started(folder)
    tokenizer = load_tokenizer(started.model, trust_remote_code=config.trust_remote_code)
    prompts = load_prompts(config, as_chat=tokenizer.chat_template is not None)
    return Assembly(folder, config, started, tokenizer, prompts)


def load_tokenizer(model: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        model, trust_remote_code=trust_remote_code, padding_side="left", truncation_side="left"
    )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def end_tokens(model: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a completion: the tokenizer's, and those of the model's generation config."""
    declared: Any = None
    if (model / "generation_config.json").is_file():
        declared = GenerationConfig.from_pretrained(model).eos_token_id
    ids = [declared] if isinstance(declared, int) else list(declared or [])
    return tuple(sorted({*ids, tokenizer.eos_token_id} - {None}))


def _started(folder: RunFolder) -> EngineList:
    told = read_json(folder.root / "engines.json")
    home = told.get("home")
    return EngineList(
        told["kind"],
        tuple(told["engines"]),
        Path(told["model"]),
        told["max_model_len"],
        home=None if home is None else Path(home),
        max_num_seqs=told.get("max_num_seqs"),
        scorers=[ScorerEngines(**{**one, "model": Path(one["model"])}) for one in told.get("scorers", ())],
        sleeps=told.get("sleeps", False),
    )
