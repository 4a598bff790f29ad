"""The engines and slots of one rank, from the list of engines that the launcher started."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from transformers import GenerationConfig, PreTrainedTokenizerBase

from ycore.config.schema import Offload, RunConfig
from ycore.engine import NEVER, Engine, SamplingParams, WeightSource
from ycore.engine.kinds import KINDS, EngineKind
from ycore.engine.server import KEEP, Server, SleepingEngine, SleepTogether, restart_timeout_s
from ycore.engine.sight import Sight, image_token_ids
from ycore.placement.allocator import Allocator
from ycore.placement.placement import ROLLOUT, SlotPool, in_order, parse_placement
from ycore.placement.service import RemoteAllocator, home_rank
from ycore.placement.slots import Sleeper, Slots
from ycore.run.files import ALLOCATOR, RunFolder, read_json
from ycore.run.reports import this_rank
from ycore.run.trace import TraceWriter
from ycore.scoring.scoring import ScorerEngines, scorer_servers

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


@dataclass(frozen=True, kw_only=True)
class RankEngines:
    """One rank's clients of the machine's engines, and the slots that these stand on."""

    folder: RunFolder
    config: RunConfig
    started: EngineList
    tokenizer: PreTrainedTokenizerBase
    sight: Sight | None = None
    """The image processor; None where no prompt has pictures."""

    @property
    def kind(self) -> EngineKind:
        return KINDS[self.started.kind]

    @property
    def num_ranks(self) -> int:
        """How many ranks share the machine's engines."""
        return this_rank().local_world if self.kind.has_servers else 1

    @property
    def num_slots(self) -> int:
        return self.started.num_slots or max(1, len(self.started.engines))

    def engines(self, model: Any = None, *, source: WeightSource | None = None) -> list[Engine]:
        """Return clients of all rollout engines of the machine, or one engine that writes with `model`.

        Args:
            model: The policy in this process, for a kind of engine without servers.
            source: The policy's weights in this process, for `engine.sync=ipc`.
        """
        sampling = self._sampling()
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
        if self.num_ranks > 1:
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

    def _sampling(self) -> SamplingParams:
        """Return how completions are sampled: the run's limits, TRL's fields, every end token of the model."""
        trl = self.config.trl
        model = self.started.model
        end_ids: Any = None
        if (model / "generation_config.json").is_file():
            end_ids = GenerationConfig.from_pretrained(model).eos_token_id
        end_ids = [end_ids] if isinstance(end_ids, int) else end_ids or []
        # The trainer's head does not write these either.
        image_ids = image_token_ids(read_json(model / "config.json"))
        return SamplingParams(
            max_tokens=self.config.max_tokens,
            temperature=trl.get("temperature", 1.0),
            top_p=trl.get("top_p", 1.0),
            top_k=trl.get("top_k", 0),
            min_p=trl.get("min_p") or 0.0,
            repetition_penalty=trl.get("repetition_penalty", 1.0),
            stop_token_ids=tuple(sorted({*end_ids, self.tokenizer.eos_token_id} - {None})),
            logit_bias=dict.fromkeys(image_ids, NEVER) if image_ids else None,
        )
