"""From a run's folder to the parts of its controller: prompts, engines, scorers, slots."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ycore.config.resolve import read_config, require_rollouts
from ycore.config.schema import RunConfig
from ycore.data.prompts import PromptSet, load_prompts
from ycore.engine import Engine
from ycore.engine.sight import load_sight
from ycore.errors import DataError
from ycore.placement.slots import Slots
from ycore.rollout.writers import RunDialogues, build_writer
from ycore.round.ahead import ControllerAhead
from ycore.round.in_flight import InFlight
from ycore.round.journal import Journal
from ycore.round.peers import Peers
from ycore.round.rank_engines import EngineList, RankEngines
from ycore.round.sampling import Curriculum, DrawSource, Rules, Shard, attention_cost
from ycore.round.step import Controller, ShareWeights
from ycore.run.files import ImageStore, RunFolder, read_json
from ycore.scoring.group_rewards import Constraints, min_stds, normalizes_each_reward
from ycore.scoring.judge_scorer import judge_questions
from ycore.scoring.scorers import build_scoring
from ycore.scoring.scoring import Policy, Scoring
from ycore.types import THOUGHT_TAG, Completion, Prompt, from_json, opens_thinking

_CARRY_AGE = 4
"""Policy versions by which a completion that goes on in a later round may lag behind with its first token."""


@dataclass(frozen=True, kw_only=True)
class Assembly(RankEngines):
    """The parts of a run's controller. Example: `parts = assemble(root); parts.controller(parts.engines())`."""

    prompts: PromptSet
    dialogues: RunDialogues

    def controller(
        self,
        engines: Sequence[Engine],
        *,
        peers: Peers | None = None,
        share_weights: ShareWeights | None = None,
        journal: Journal | None = None,
        draws: DrawSource | None = None,
        rules: Rules | None = None,
        slots: Slots | None = None,
    ) -> Controller:
        """Return a controller over `engines`, slot by slot; what is not given follows from the run's config."""
        config = self.config
        peers = peers or Peers()
        rules = rules or self.rules(engines)
        if slots is None and config.given_pairs:
            slots = Slots(self.num_slots)
        max_age = config.sampling.max_age
        in_flight = None if journal is None else self._in_flight(rules)
        if in_flight is not None:
            max_age = max(max_age, in_flight.max_age)
        make: Callable[..., Controller] = Controller
        if journal is not None and config.sampling.max_staleness > 0:
            make = partial(
                ControllerAhead,
                num_steps=config.steps,
                max_staleness=config.sampling.max_staleness,
                min_effective_share=config.sampling.min_effective_share,
            )
        return make(
            engines=engines,
            scoring=self._scoring(engines),
            draws=draws or self.draws(peers),
            rules=rules,
            peers=peers,
            share_weights=share_weights,
            journal=journal,
            max_surplus_age=max_age,
            slots=slots,
            in_flight=in_flight,
            with_thinking=self.with_thinking,
            writer=build_writer(
                config,
                self.folder,
                self.tokenizer,
                self.dialogues,
                max_prompt_tokens=self.max_prompt_tokens,
            ),
        )

    def _in_flight(self, rules: Rules) -> InFlight | None:
        """Return the groups that newer weights go on with; None where a round ends with its last completion."""
        config = self.config
        if not config.streams and config.sampling.oversample == 1:
            return None
        return InFlight(
            partial(self.tokenizer.decode, skip_special_tokens=True),
            max_tokens=config.max_tokens,
            max_age=config.sampling.max_staleness if config.streams else _CARRY_AGE,
            seed=rules.seed,
            group_size=rules.group_size,
            streams=config.streams,
        )

    def evaluation(self, controller: Controller) -> Controller | None:
        """Return a controller of the run's held-out rows beside the run's controller; None where it has none."""
        config = self.config.for_evaluation()
        if config is None:
            return None
        prompts = _prompts(config, self.tokenizer, ImageStore(self.folder.images))
        if prompts.shows is not None and self.sight is None:
            raise DataError(
                f"row {prompts.shows} of {config.dataset} has a picture, and no row of {self.config.dataset}; "
                "train on pictures too, or evaluate with `ycore eval`"
            )
        parts = replace(self, config=config, prompts=prompts)
        scoring = controller.scoring
        if (config.rewards, config.unscored) != (self.config.rewards, self.config.unscored):
            parts = replace(parts, started=self._scorers_of(config))
            scoring = parts._scoring(controller.engines)
        return controller.for_evaluation(
            draws=parts.draws(controller.peers),
            rules=parts.rules(controller.engines),
            scoring=scoring,
        )

    def _scorers_of(self, config: RunConfig) -> EngineList:
        """Return the engine list with the scorers' places among the rewards of an evaluation."""
        scorers = []
        for scorer in self.started.scorers:
            served = [self.config.rewards[source] for source in scorer.sources]
            sources = [index for index, spec in enumerate(config.rewards) if spec in served]
            if sources:
                scorers.append(replace(scorer, sources=sources))
        return replace(self.started, scorers=scorers)

    def _scoring(self, engines: Sequence[Engine]) -> Scoring:
        policy = Policy(engines, self.tokenizer, self.started.max_model_len)
        return build_scoring(self.config, self.folder, self.started.scorers, policy=policy)

    @property
    def home(self) -> RunFolder:
        """Where checkpoints, metrics and the model go, on every machine of the run."""
        return self.folder if self.started.home is None else RunFolder(self.started.home)

    @property
    def max_prompt_tokens(self) -> int:
        return self.started.max_model_len - self.config.max_tokens

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the prompt's token ids: a chat goes through the chat template, text does not."""
        if prompt.images:
            assert self.sight is not None
            return self.sight.prompt_ids(prompt)
        if self.dialogues.tool_sets:
            return self.dialogues.of_prompt(prompt).prompt_ids(
                prompt.content, prompt.template_arguments
            )
        if isinstance(prompt.content, str):
            return tuple(self.tokenizer(prompt.content)["input_ids"])
        run_arguments = self.config.trl.get("chat_template_kwargs") or {}
        template_arguments = {**run_arguments, **prompt.template_arguments}
        ids = self.tokenizer.apply_chat_template(
            prompt.content,
            tools=list(prompt.tools) or None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **template_arguments,
        )
        return tuple(ids)

    def with_thinking(self, completion: Completion, prompt_ids: Sequence[int]) -> Completion:
        """Say whether the prompt opened the thinking, and put tags into the text that engines skip as special tokens."""
        in_thinking = opens_thinking(self.tokenizer.decode(list(prompt_ids[-16:])))
        text = completion.text
        if not completion.turns and not self._thought_ids.isdisjoint(completion.token_ids):
            text = "".join(
                str(self.tokenizer.decode(list(token_ids), skip_special_tokens=not are_tags))
                for are_tags, token_ids in groupby(
                    completion.token_ids, key=self._thought_ids.__contains__
                )
            )
        return replace(completion, text=text, in_thinking=in_thinking)

    @cached_property
    def _thought_ids(self) -> frozenset[int]:
        """The special tokens that are tags around the thinking, or the parts of one."""
        return frozenset(
            number
            for number, token in self.tokenizer.added_tokens_decoder.items()
            if token.special
            # gpt-oss has tags of two special tokens and a word
            and (
                THOUGHT_TAG.fullmatch(token.content)
                or token.content in ("<|channel|>", "<|message|>")
            )
        )

    def draws(self, peers: Peers) -> DrawSource:
        """Return a rank's prompts in the run's order; an evaluation asks each once, in the order of the rows."""
        config = self.config
        prompts = self.prompts.prompts
        return DrawSource(
            prompts,
            seed=None if config.algorithm == "eval" else config.seed,
            curriculum=Curriculum.of(config, prompts),
            encode=self.encode,
            max_prompt_tokens=self.max_prompt_tokens,
            shard=Shard(peers.rank, peers.world),
        )

    def rules(self, engines: Sequence[Engine]) -> Rules:
        """Return how a round samples on a rank of a machine with these engines. An evaluation takes every group as it
        comes."""
        config = self.config
        evaluates = config.algorithm == "eval"
        listed: Sequence[Any] = engines
        group_size = config.group_size
        if config.given_pairs:
            listed = self.started.engines
            group_size = 2
        elif evaluates:
            group_size = config.num_samples
        max_num_seqs = self.started.max_num_seqs
        max_in_flight = None
        if max_num_seqs is not None and not (self.dialogues.tool_sets or config.agent):
            # One more than fits, so that no engine waits for the controller to notice that a group has ended. With tools
            # all at once: while they answer, nobody can tell how many fit.
            num_engines = len(listed) / self.num_ranks
            max_in_flight = math.ceil(max_num_seqs * num_engines / group_size) + 1
        return Rules(
            group_size=group_size,
            seed=config.seed,
            reward_weights=tuple(config.reward_weights),
            dynamic=config.sampling.dynamic and not evaluates,
            max_tries=config.sampling.max_tries,
            attention_cost=attention_cost(read_json(self.started.model / "config.json")),
            teaches_alone=config.teaches_alone and not evaluates,
            greedy_baseline=config.needs_greedy_baseline and not evaluates,
            # An environment may draw its world for each place in the order of prompts, also from one row.
            num_prompts=None if config.env else len(self.prompts.prompts),
            environments=tuple(part.name for part in config.mixture)
            or (tuple(config.environments) if len(config.env) > 1 else ()),
            constraints=Constraints.of(config),
            in_order=config.deterministic,
            oversample=1.0 if evaluates else config.sampling.oversample,
            reuse=0.0 if evaluates else config.sampling.reuse,
            min_stds_R=min_stds(config),
            normalizes_each=normalizes_each_reward(config),
            max_in_flight=max_in_flight,
        )


def assemble(root: Path) -> Assembly:
    """Read the launcher's files in a run's folder, and load tokenizer and prompts."""
    folder = RunFolder(root)
    config = require_rollouts(read_config(folder))
    started = from_json(EngineList, read_json(folder.engines))
    tokenizer = load_tokenizer(started.model, trust_remote_code=config.trust_remote_code)
    store = ImageStore(folder.images)
    prompts = _prompts(config, tokenizer, store)
    sight = None
    if prompts.shows is not None:
        sight = load_sight(
            started.model,
            store,
            tokenizer,
            trust_remote_code=config.trust_remote_code,
            template_arguments=config.trl.get("chat_template_kwargs"),
        )
    dialogues = RunDialogues(config, tokenizer, run_folder=root)
    return Assembly(
        folder=folder,
        config=config,
        started=started,
        tokenizer=tokenizer,
        sight=sight,
        prompts=prompts,
        dialogues=dialogues,
    )


def _prompts(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, store: ImageStore
) -> PromptSet:
    prompts = load_prompts(config, as_chat=tokenizer.chat_template is not None, store=store)
    if config.trains_a_judge:
        return judge_questions(config, prompts, tokenizer=tokenizer)
    return prompts


def load_tokenizer(model: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        model, trust_remote_code=trust_remote_code, padding_side="left", truncation_side="left"
    )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
