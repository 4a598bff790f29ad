"""From a run's folder to the parts of its controller: prompts, engines, scorers, slots."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from ycore.config.resolve import read_config, require_rollouts
from ycore.config.schema import Offload, RunConfig
from ycore.data.prompts import PromptSet, load_prompts
from ycore.engine import NEVER, Engine, SamplingParams, WeightSource
from ycore.engine.kinds import KINDS, EngineKind
from ycore.engine.server import Server
from ycore.engine.sight import Sight, image_token_ids, load_sight
from ycore.engine.sleeping import SleepingEngine, SleepTogether
from ycore.errors import DataError
from ycore.judge.agreement import judge_questions, trains_a_judge
from ycore.placement.allocator import Allocator
from ycore.placement.learning import SleepLevels
from ycore.placement.placement import ALLOCATOR, ROLLOUT, SlotPool, in_order, parse_placement
from ycore.placement.remote_allocator import RemoteAllocator
from ycore.placement.shared_allocator import home_rank
from ycore.placement.slots import Sleeper, Slots
from ycore.rollout.tool_pool import ToolSet, describe_tools
from ycore.rollout.writers import RunDialogues, build_writer
from ycore.round.ahead import ControllerAhead
from ycore.round.curriculum import Curriculum, guesses_from
from ycore.round.journal import Journal
from ycore.round.loop import ShareWeights
from ycore.round.peers import Peers
from ycore.round.sampling import WHOLE, Cost, DrawSource, Rules, Shard
from ycore.round.step import Controller
from ycore.run.files import read_json
from ycore.run.images import ImageStore
from ycore.run.paths import RunFolder
from ycore.run.reports import this_rank
from ycore.run.trace import TraceWriter
from ycore.scoring.constraints import Constraints
from ycore.scoring.group_rewards import min_stds, normalizes_each_reward
from ycore.scoring.scorers import build_scoring
from ycore.scoring.scoring import Policy, ScorerEngines, scorer_servers
from ycore.types import Prompt

S = TypeVar("S")
_AT_ONCE = (
    64  # requests of a role that a slot takes at once, where the engines' own limit is not known
)


@dataclass(frozen=True, slots=True)
class EngineList:
    """The engines that the launcher started, from `engines.json`.

    `engines` and those of `scorers` are slot by slot, as many on each; `num_slots` None is one engine a slot. `home`:
    the folder of the whole run, on a machine that is not its first. `max_num_seqs`: completions that one engine
    writes at once. `sleeps`: engines share devices with the trainer, and sleep while others use them. `offload`: what
    the trainer keeps in host memory meanwhile. `on_host`: a preflight's own model finds no room on the device.
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
    on_host: bool = False


@dataclass(frozen=True)
class Assembly:
    """The parts of a run's controller. Example: `parts = assemble(root); parts.controller(parts.engines())`."""

    folder: RunFolder
    config: RunConfig
    started: EngineList
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSet
    tool_sets: Mapping[str | None, ToolSet] = field(default_factory=dict)
    """The tools of each environment, by its name; {} without tools and environments."""
    sight: Sight | None = None
    """Of a model whose prompts have pictures."""

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
        """A controller over `engines`, slot by slot; what is not given follows from the run's config."""
        peers = peers or Peers()
        policy = Policy(engines, self.tokenizer, self.started.max_model_len)
        make: Callable[..., Controller] = Controller
        if self.config.sampling.max_staleness and journal is not None:
            make = partial(ControllerAhead, num_steps=self.config.steps)
        return make(
            engines=engines,
            scoring=build_scoring(self.config, self.folder, self.started.scorers, policy=policy),
            draws=draws or self.draws(Shard(peers.rank, peers.world)),
            rules=rules
            or self.rules(
                num_engines=self._share_of(
                    self.started.engines if self.config.given_pairs else engines
                )
            ),
            peers=peers,
            share_weights=share_weights,
            sync_every=max(1, self.config.sync_every),
            journal=journal,
            max_surplus_age=self.config.sampling.max_age,
            slots=slots or (Slots(self._num_slots) if self.config.given_pairs else None),
            writer=build_writer(
                self.config,
                self.folder,
                self.tokenizer,
                self.dialogues,
                max_prompt_tokens=self.max_prompt_tokens,
            ),
        )

    @cached_property
    def dialogues(self) -> RunDialogues:
        return RunDialogues(self.config, self.tokenizer, self.tool_sets)

    def evaluation(self, controller: Controller) -> Controller | None:
        """Beside the run's controller, that of its held-out rows; None where the run has none."""
        config = self.config.for_evaluation()
        if config is None:
            return None
        prompts = _prompts(config, self.tokenizer, ImageStore(self.folder.images))
        if prompts.shows is not None and self.sight is None:
            raise DataError(
                f"row {prompts.shows} of {config.dataset} has a picture, and no row of {self.config.dataset}; "
                "train on pictures too, or evaluate with `ycore eval`"
            )
        parts, scoring = replace(self, config=config, prompts=prompts), controller.scoring
        if config.rewards != self.config.rewards:
            started = [  # served for the run's own rewards; here by their places among those of the evaluation
                replace(one, sources=[n for n, spec in enumerate(config.rewards) if spec in own])
                for one in self.started.scorers
                if (own := [self.config.rewards[source] for source in one.sources])
            ]
            policy = Policy(controller.engines, self.tokenizer, self.started.max_model_len)
            scoring = build_scoring(config, self.folder, started, policy=policy)
        draws = parts.draws(Shard(controller.peers.rank, controller.peers.world))
        rules = parts.rules(num_engines=self._share_of(controller.engines))
        return controller.beside(draws=draws, rules=rules, scoring=scoring)

    def _share_of(self, engines: Sequence[Any]) -> float:
        """How many of these engines a rank of the machine has for itself."""
        return len(engines) / (this_rank().local_world if self._shares_slots else 1)

    @property
    def home(self) -> RunFolder:
        """Where checkpoints, metrics and the model go, on every machine of the run."""
        return self.folder if self.started.home is None else RunFolder(self.started.home)

    @property
    def max_prompt_tokens(self) -> int:
        return self.started.max_model_len - self.config.max_tokens

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's token ids: a chat goes through the chat template, text does not."""
        if prompt.images:
            assert self.sight is not None
            return self.sight.prompt_ids(prompt)
        if self.tool_sets:
            return self.dialogues.of_prompt(prompt).prompt_ids(prompt.content)
        if isinstance(prompt.content, str):
            return tuple(self.tokenizer(prompt.content)["input_ids"])
        template_arguments = self.config.trl.get("chat_template_kwargs") or {}
        ids = self.tokenizer.apply_chat_template(
            prompt.content,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **template_arguments,
        )
        return tuple(ids)

    def sampling(self) -> SamplingParams:
        """How completions are sampled: the run's sizes, TRL's fields of generation, every end token of the model."""
        trl, model = self.config.trl, self.started.model
        declared: Any = None
        if (model / "generation_config.json").is_file():
            declared = GenerationConfig.from_pretrained(model).eos_token_id
        declared = [declared] if isinstance(declared, int) else declared or []
        never = image_token_ids(
            read_json(model / "config.json")
        )  # the trainer's head does not write them either
        return SamplingParams(
            max_tokens=self.config.max_tokens,
            temperature=trl.get("temperature", 1.0),
            top_p=trl.get("top_p", 1.0),
            top_k=trl.get("top_k", 0),
            min_p=trl.get("min_p") or 0.0,
            repetition_penalty=trl.get("repetition_penalty", 1.0),
            stop_token_ids=tuple(sorted({*declared, self.tokenizer.eos_token_id} - {None})),
            logit_bias=dict.fromkeys(never, NEVER) if never else None,
        )

    def draws(self, shard: Shard = WHOLE) -> DrawSource:
        """A rank's prompts in the run's order; in the order of the rows for an evaluation, which asks each once."""
        return DrawSource(
            self.prompts.prompts,
            seed=self.config.seed if self.config.algorithm != "eval" else None,
            encode=self.encode,
            max_prompt_tokens=self.max_prompt_tokens,
            shard=shard,
            curriculum=self.curriculum(),
        )

    def curriculum(self) -> Curriculum | None:
        config, settings = self.config, self.config.sampling
        if not settings.curriculum or config.algorithm == "eval":
            return None
        guesses = None
        if isinstance(settings.curriculum, str):
            guesses = guesses_from(self.prompts.prompts, settings.curriculum, config.group_size)
        return Curriculum(
            seed=config.seed,
            guesses=guesses,
            drop_after=settings.drop_after,
            drop_at=settings.drop_at,
            least=settings.least,
        )

    def rules(self, *, num_engines: float = 1) -> Rules:
        """How a round samples on a rank with this share of the engines. An evaluation takes every group as it comes."""
        config, evaluates = self.config, self.config.algorithm == "eval"
        group_size = (
            (2 if config.given_pairs else config.num_samples) if evaluates else config.group_size
        )
        at_once = self.started.max_num_seqs
        return Rules(
            group_size=group_size,
            seed=config.seed,
            reward_weights=tuple(reward.weight for reward in config.rewards),
            dynamic=config.sampling.dynamic and not evaluates,
            max_tries=config.sampling.max_tries,
            cost=Cost.of_model(read_json(self.started.model / "config.json")),
            teaches_alone=config.teaches_alone and not evaluates,
            greedy_baseline=config.needs_greedy_baseline and not evaluates,
            # An environment may draw its world for each place in the order of prompts, also from one row.
            num_prompts=None if config.env else len(self.prompts.prompts),
            environments=tuple(config.environments) if len(config.env) > 1 else (),
            constraints=Constraints.of(config),
            in_order=config.deterministic,
            oversample=1.0 if evaluates else config.sampling.oversample,
            min_stds_R=min_stds(config.rewards, config.sampling.dust),
            normalizes_each=normalizes_each_reward(config),
            # One more than fits, so that no engine waits for the controller to notice that a group has ended. With
            # tools all at once: while they answer, nobody can tell how many fit.
            max_in_flight=None
            if at_once is None or self.tool_sets or config.agent is not None
            else math.ceil(at_once * num_engines / group_size) + 1,
        )

    @property
    def _shares_slots(self) -> bool:
        """Whether all ranks of the machine use all of its slots; otherwise a rank generates by itself."""
        return self.kind.has_servers

    @property
    def kind(self) -> EngineKind:
        return KINDS[self.started.kind]

    def engines(self, model: Any = None, *, source: WeightSource | None = None) -> list[Engine]:
        """Return this rank's clients of all rollout engines of the machine, or one engine that writes with `model`.

        Args:
            model: The policy in this process, for a kind of engine without servers.
            source: The policy's weights in this process, for `engine.sync=ipc`.
        """
        if not self.kind.has_servers:
            return [self.kind.in_process(model, self.tokenizer, self.sampling(), self.sight)]
        settings, names, homes = self.config.engine, self.started.engines, self._homes
        own = {name for slot in homes for name in self._on_slot(names, slot)}
        return [
            self.kind.client(
                name,
                self.folder.socket(name),
                self.sampling(),
                settings,
                sleeps=self.started.sleeps and name in own,
                is_home=name in own,
                sight=self.sight,
                source=source,
            )
            for name in names
        ]

    def slots(self, engines: Sequence[Engine]) -> Slots:
        """The machine's slots. A rank that generates by itself, or is alone, has an allocator of its own.

        Where engines stay awake, a change of role only changes who gets requests. Where they sleep, one role of a slot
        is awake at a time, and a change of role is a sleep and a wake.
        """
        rank = this_rank()
        roles = in_order([ROLLOUT, *(scorer.role for scorer in self.started.scorers)])
        num_engines = max(1, len(self.started.engines))
        at_once = (self.started.max_num_seqs or _AT_ONCE) * num_engines // self._num_slots
        capacity = None if len(roles) == 1 else dict.fromkeys(roles, at_once)
        pool = SlotPool(self._num_slots, roles, capacity, exclusive=self.started.sleeps)
        placement = parse_placement(self.config.placement)
        allocator = remote = None
        if not self._shares_slots or rank.local_world == 1:
            allocator = Allocator(pool, placement)
        else:
            socket = self.folder.socket(ALLOCATOR)
            remote = RemoteAllocator(
                socket, pool, placement, rank=rank.local, num_ranks=rank.local_world
            )
        return Slots(
            self._num_slots,
            allocator=allocator,
            remote=remote,
            sleepers=self._sleepers(engines) if self.started.sleeps else None,
            trace=TraceWriter(self.folder.trace),
            rank=rank.number,
        )

    def _sleepers(self, engines: Sequence[Engine]) -> Mapping[str, Mapping[int, Sleeper]]:
        """The engines that sleep on this rank's own slots, by role and slot.

        The policy's weights are sent again before use, so its engines drop them. For a model with frozen weights the
        level of sleep is learned, for all slots of the rank at once.
        """
        policy = [engine.sleeper for engine in engines]
        models: dict[str, list[Sequence[Sleeper | None]]] = {ROLLOUT: [policy]}
        for scorer in self.started.scorers:
            levels, servers = (
                SleepLevels(),
                scorer_servers(self.config, self.folder, scorer, Server),
            )
            models.setdefault(scorer.role, []).append(
                [SleepingEngine(server, levels=levels) for server in servers]
            )

        def on_slot(engines: Sequence[Sleeper | None], slot: int) -> list[Sleeper]:
            return [engine for engine in self._on_slot(engines, slot) if engine is not None]

        return {
            role: {
                slot: SleepTogether([on_slot(engines, slot) for engines in of_role])
                for slot in self._homes
            }
            for role, of_role in models.items()
        }

    @property
    def _num_slots(self) -> int:
        return self.started.num_slots or max(1, len(self.started.engines))

    def _on_slot(self, engines: Sequence[S], slot: int) -> Sequence[S]:
        each = len(engines) // self._num_slots
        return engines[slot * each : (slot + 1) * each]

    @property
    def _homes(self) -> list[int]:
        """The slots whose engines this rank wakes, puts to sleep and sends weights; each slot is of one rank."""
        rank = this_rank()
        return [
            slot
            for slot in range(self._num_slots)
            if home_rank(slot, rank.local_world) == rank.local
        ]


def assemble(root: Path) -> Assembly:
    """Read the launcher's files in a run's folder, and load tokenizer and prompts."""
    folder = RunFolder(root)
    config = require_rollouts(read_config(folder))
    started = TypeAdapter(EngineList).validate_python(read_json(folder.engines))
    tokenizer = load_tokenizer(started.model, trust_remote_code=config.trust_remote_code)
    store = ImageStore(folder.images)
    prompts = _prompts(config, tokenizer, store)
    sight = None
    if prompts.shows is not None:
        template_arguments = config.trl.get("chat_template_kwargs")
        how: Any = {
            "trust_remote_code": config.trust_remote_code,
            "template_arguments": template_arguments,
        }
        sight = load_sight(started.model, store, tokenizer, **how)
    tool_sets = describe_tools(config, run_folder=root) if config.replay is None else {}
    return Assembly(folder, config, started, tokenizer, prompts, tool_sets, sight)


def _prompts(config: RunConfig, tokenizer: PreTrainedTokenizerBase, store: ImageStore) -> PromptSet:
    prompts = load_prompts(config, as_chat=tokenizer.chat_template is not None, store=store)
    if trains_a_judge(config):
        return judge_questions(config, prompts, tokenizer=tokenizer)
    return prompts


def load_tokenizer(model: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        model, trust_remote_code=trust_remote_code, padding_side="left", truncation_side="left"
    )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
