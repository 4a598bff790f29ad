"""From a run's folder to the parts of its controller: prompts, engines, scorers, slots."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import TypeAdapter
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from ycore.config.resolve import read_config, require_rollouts
from ycore.config.schema import Offload, RunConfig
from ycore.data.prompts import PromptSet, load_prompts
from ycore.engine import NEVER, Engine, SamplingParams, WeightSource
from ycore.engine.kinds import KINDS, EngineKind
from ycore.engine.server import KEEP, Server, SleepingEngine, SleepTogether, restart_timeout_s
from ycore.engine.sight import Sight, image_token_ids, load_sight
from ycore.errors import DataError
from ycore.placement.allocator import Allocator
from ycore.placement.placement import ROLLOUT, SlotPool, in_order, parse_placement
from ycore.placement.service import RemoteAllocator, home_rank
from ycore.placement.slots import Sleeper, Slots
from ycore.rollout.writers import RunDialogues, build_writer
from ycore.round.ahead import controller_of
from ycore.round.journal import Journal
from ycore.round.peers import Peers
from ycore.round.sampling import DrawSource, Rules, Shard, rules_of
from ycore.round.step import Controller, ShareWeights
from ycore.run.files import ALLOCATOR, ImageStore, RunFolder, read_json
from ycore.run.reports import this_rank
from ycore.run.trace import TraceWriter
from ycore.scoring.judge_scorer import judge_questions
from ycore.scoring.scorers import build_scoring
from ycore.scoring.scoring import Policy, ScorerEngines, Scoring, scorer_servers
from ycore.types import THOUGHT_TAG, Completion, Prompt, opens_thinking

S = TypeVar("S")
_DEFAULT_CAPACITY = 64
"""Requests of a role that a slot takes at once, where the engines' own limit is not known."""
_SLOWEST_TOKENS_PER_S = 10  # of a completion that is still waited for


@dataclass(frozen=True)
class EngineList:
    """The engines that the launcher started, from `engines.json`.

    `engines` and those of `scorers` are slot by slot, as many on each; `num_slots` None is one engine a slot. `home`:
    the folder of the whole run, on a machine that is not its first. `max_num_seqs`: completions that one engine
    writes at once. `sleeps`: engines share devices with the trainer, and sleep while others use them. `offload`: what
    the trainer keeps in host memory meanwhile. `away`: those on other machines.
    """

    kind: str
    engines: Sequence[str]
    model: Path
    max_model_len: int
    num_slots: int | None = None
    home: Path | None = None
    max_num_seqs: int | None = None
    scorers: Sequence[ScorerEngines] = ()
    sleeps: bool = False
    offload: Offload = "none"
    away: Sequence[str] = ()

    @classmethod
    def read(cls, folder: RunFolder) -> Self:
        return TypeAdapter(cls).validate_python(read_json(folder.engines))


@dataclass(frozen=True)
class Assembly:
    """The parts of a run's controller. Example: `parts = assemble(root); parts.controller(parts.engines())`."""

    folder: RunFolder
    config: RunConfig
    started: EngineList
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSet
    dialogues: RunDialogues
    sight: Sight | None = None
    """The image processor; None where no prompt has pictures."""

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
        if slots is None and config.given_pairs:
            slots = Slots(self.num_slots)
        return controller_of(
            config,
            journal,
            partial(self.tokenizer.decode, skip_special_tokens=True),
            engines=engines,
            scoring=self._scoring(engines),
            draws=draws or self.draws(peers),
            rules=rules or self.rules(engines),
            peers=peers,
            share_weights=share_weights,
            slots=slots,
            with_thinking=self.with_thinking,
            writer=build_writer(
                config,
                self.folder,
                self.tokenizer,
                self.dialogues,
                max_prompt_tokens=self.max_prompt_tokens,
            ),
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
    def kind(self) -> EngineKind:
        return KINDS[self.started.kind]

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
        return DrawSource.of_run(
            self.config,
            self.prompts.prompts,
            encode=self.encode,
            max_prompt_tokens=self.max_prompt_tokens,
            shard=Shard(peers.rank, peers.world),
        )

    def rules(self, engines: Sequence[Engine]) -> Rules:
        """Return how a round samples on a rank of a machine with these engines."""
        listed = self.started.engines if self.config.given_pairs else engines
        num_ranks = this_rank().local_world if self.kind.has_servers else 1
        return rules_of(
            self.config,
            model=self.started.model,
            num_prompts=len(self.prompts.prompts),
            max_num_seqs=None if self.dialogues.tool_sets else self.started.max_num_seqs,
            num_engines=len(listed) / num_ranks,
        )

    @property
    def num_slots(self) -> int:
        return self.started.num_slots or max(1, len(self.started.engines))

    def engines(self, model: Any = None, *, source: WeightSource | None = None) -> list[Engine]:
        """Return clients of all rollout engines of the machine, or one engine that writes with `model`.

        Args:
            model: The policy in this process, for a kind of engine without servers.
            source: The policy's weights in this process, for `engine.sync=ipc`.
        """
        sampling = sampling_of(self.config, self.started.model, self.tokenizer)
        if not self.kind.has_servers:
            from ycore.engine.transformers_engine import TransformersEngine

            is_half = self.config.dtype != "float32"
            return [
                TransformersEngine(model, self.tokenizer, sampling, self.sight, is_half=is_half)
            ]
        from ycore.engine.vllm_engine import HostEngine, VllmEngine

        settings = self.config.engine
        names = self.started.engines
        home_names = {name for slot in self._home_slots for name in self._on_slot(names, slot)}
        engines: list[Engine] = []
        for name in names:
            kind = HostEngine if name in self.started.away else VllmEngine
            engines.append(
                kind(
                    name,
                    self.folder.socket(name),
                    sampling,
                    request_timeout_s=max(
                        settings.request_timeout_s,
                        self.config.max_tokens / _SLOWEST_TOKENS_PER_S,
                    ),
                    restart_timeout_s=restart_timeout_s(settings),
                    min_verified=settings.min_verified,
                    sleeps=self.started.sleeps and name in home_names,
                    is_home=name in home_names,
                    sight=self.sight,
                    source=source,
                )
            )
        return engines

    def slots(self, engines: Sequence[Engine]) -> Slots:
        """Return the machine's slots. A rank that generates by itself, or is alone, has an allocator of its own.

        Where engines stay awake, a change of role only changes who gets requests. Where they sleep, one role of a slot
        is awake at a time, and a change of role is a sleep and a wake.
        """
        rank = this_rank()
        roles = in_order([ROLLOUT, *(scorer.role for scorer in self.started.scorers)])
        num_engines = max(1, len(self.started.engines))
        depth = (self.started.max_num_seqs or _DEFAULT_CAPACITY) * num_engines // self.num_slots
        capacity = None if len(roles) == 1 else dict.fromkeys(roles, depth)
        pool = SlotPool(self.num_slots, roles, capacity, exclusive=self.started.sleeps)
        placement = parse_placement(self.config.placement)
        allocator: Allocator | RemoteAllocator
        if self.kind.has_servers and rank.local_world > 1:
            socket = self.folder.socket(ALLOCATOR)
            allocator = RemoteAllocator(
                socket, pool, placement, rank=rank.local, num_ranks=rank.local_world
            )
        else:
            allocator = Allocator(pool, placement)
        return Slots(
            self.num_slots,
            allocator=allocator,
            sleepers=self._sleepers(engines) if self.started.sleeps else None,
            trace=TraceWriter(self.folder.trace),
            rank=rank.number,
        )

    def _sleepers(self, engines: Sequence[Engine]) -> Mapping[str, Mapping[int, Sleeper]]:
        """Return the engines that sleep on this rank's home slots, by role and slot.

        The policy's weights are sent again before use, so its engines drop them. Those of other models are frozen, and
        kept in the machine's memory.
        """
        models: dict[str, list[Sequence[Sleeper | None]]] = {}
        models[ROLLOUT] = [[engine.sleeper for engine in engines]]
        for scorer in self.started.scorers:
            servers = scorer_servers(self.config, self.folder, scorer, Server)
            sleepers = [SleepingEngine(server, level=KEEP) for server in servers]
            models.setdefault(scorer.role, []).append(sleepers)

        def on_slot(sleepers: Sequence[Sleeper | None], slot: int) -> list[Sleeper]:
            return [sleeper for sleeper in self._on_slot(sleepers, slot) if sleeper is not None]

        return {
            role: {
                slot: SleepTogether([on_slot(sleepers, slot) for sleepers in of_role])
                for slot in self._home_slots
            }
            for role, of_role in models.items()
        }

    def _on_slot(self, engines: Sequence[S], slot: int) -> Sequence[S]:
        engines_per_slot = len(engines) // self.num_slots
        return engines[slot * engines_per_slot : (slot + 1) * engines_per_slot]

    @property
    def _home_slots(self) -> list[int]:
        """The slots whose engines this rank wakes, puts to sleep and sends weights; each slot is of one rank."""
        rank = this_rank()
        return [
            slot
            for slot in range(self.num_slots)
            if home_rank(slot, rank.local_world) == rank.local
        ]


def assemble(root: Path) -> Assembly:
    """Read the launcher's files in a run's folder, and load tokenizer and prompts."""
    folder = RunFolder(root)
    config = require_rollouts(read_config(folder))
    started = EngineList.read(folder)
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
    return Assembly(folder, config, started, tokenizer, prompts, dialogues, sight)


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


def sampling_of(
    config: RunConfig, model: Path, tokenizer: PreTrainedTokenizerBase
) -> SamplingParams:
    """Return how completions are sampled: the run's limits, TRL's fields, every end token of the model."""
    trl = config.trl
    end_ids: Any = None
    if (model / "generation_config.json").is_file():
        end_ids = GenerationConfig.from_pretrained(model).eos_token_id
    end_ids = [end_ids] if isinstance(end_ids, int) else end_ids or []
    # The trainer's head does not write these either.
    image_ids = image_token_ids(read_json(model / "config.json"))
    return SamplingParams(
        max_tokens=config.max_tokens,
        temperature=trl.get("temperature", 1.0),
        top_p=trl.get("top_p", 1.0),
        top_k=trl.get("top_k", 0),
        min_p=trl.get("min_p") or 0.0,
        repetition_penalty=trl.get("repetition_penalty", 1.0),
        stop_token_ids=tuple(sorted({*end_ids, tokenizer.eos_token_id} - {None})),
        logit_bias=dict.fromkeys(image_ids, NEVER) if image_ids else None,
    )
