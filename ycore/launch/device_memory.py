"""Who shares the devices of a run, and how: the engines of a slot's models, and the trainer's rank."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ycore.config.batch import derive_batch
from ycore.config.schema import RunConfig
from ycore.errors import ConfigError
from ycore.launch.layout import Machine, Site
from ycore.launch.scoring_models import ScoringModel
from ycore.placement.placement import ROLLOUT
from ycore.plan.job import Way, job_of
from ycore.plan.memory import NO_TRAINER, Need, TrainerMemory, trainer_memory
from ycore.plan.model_facts import ModelFacts
from ycore.plan.sharing import Shared, Sharing, room_of, share_device, share_unknown, sharings

FactsOf = Callable[[str], ModelFacts | None]
"""The sizes of a model by its name; None where they are not known before it is fetched."""

MAX_MODEL_LEN = 4096  # tokens, where neither the user nor the model asks for less
PROMPT_TOKENS = 512  # tokens of KV cache for a sequence's prompt; longer prompts wait for room
MAX_ROLLOUT_SEQS = 256
MAX_SCORER_SEQS = 32
_LOGITS = 10  # bytes of a logit where a preflight computes log-probabilities: bfloat16, float32, and their log-softmax


def sequences_at_once(config: RunConfig, num_engines: int) -> int:
    """Of one engine of the policy: all completions of a round run at once, unless the user says how many."""
    told = config.engine.args.get("max_num_seqs")
    if isinstance(told, int):
        return told
    round_size = config.prompts_per_step * (config.num_samples if config.algorithm == "eval" else config.group_size)
    return max(1, min(MAX_ROLLOUT_SEQS, math.ceil(round_size / num_engines)))


def scored_at_once(policy_at_once: int, num_policy_engines: int, num_engines: int) -> int:
    """Of one of a scorer's engines: what the policy's engines write at once."""
    return min(math.ceil(policy_at_once * num_policy_engines / num_engines), MAX_SCORER_SEQS)


class RunMemory:
    """The memory of a run on devices. Example: `RunMemory(config, site, scorers, known).share(widths, num_slots=8)`."""

    def __init__(self, config: RunConfig, site: Site, scorers: Sequence[ScoringModel], known: FactsOf) -> None:
        self._config, self._site, self._scorers = config, site, scorers
        self._models = [(ROLLOUT, config.model), *((one.role, one.name) for one in scorers)]
        self._facts = [known(name) for _, name in self._models]
        policy = self._facts[0]
        self.ways: list[Shared] = [(False, "none")]
        self._trainer = NO_TRAINER
        if policy is not None and config.algorithm != "eval":
            self._trainer = self._of_training(policy) if site.trains else _of_preflight(policy, config)
        elif site.trains and config.algorithm != "eval":
            self.ways += [(True, "none"), (True, "optimizer")]
        self.ways = _as_asked(self.ways, config)

    def _of_training(self, policy: ModelFacts) -> TrainerMemory:
        config, layout = self._config, self._site.layout
        size = derive_batch(config, world_size=layout.world, on_cpu=False).per_device_train_batch_size
        checkpointing = bool(config.trl.get("gradient_checkpointing", True))
        way = Way(layout.world, 1, layout.sharding, size, checkpointing=checkpointing)
        job = job_of(config, policy)
        self.ways = sharings(job, way)
        return trainer_memory(job, way)

    def beside(self) -> float:
        """Bytes of the trainer beside engines that are awake, at least."""
        sleeps, offload = self.ways[-1]
        return self._trainer.resting.get(offload, 0.0) if sleeps else self._trainer.peak

    def room(self, machine: Machine, *, sharing: int) -> float | None:
        """Bytes of a device for one engine, where `sharing` engines are awake together at least."""
        if machine.device_bytes is None:
            return None
        told, room = self._config.engine.gpu_memory_utilization, room_of(machine.device_bytes, machine.free_bytes)
        return (room - self.beside() if told == "auto" else told * machine.device_bytes) / sharing

    def share(self, width_of: Callable[[str, str], int], *, num_slots: int) -> Sharing:
        """Who sleeps, what leaves the device, and each engine's share; ConfigError where an engine does not fit.

        Args:
            width_of: the devices that an engine of a role and model spans.
            num_slots: of this machine.
        """
        machine, told = self._site.machine, self._config.engine.gpu_memory_utilization
        device_bytes, share, roles = (
            machine.device_bytes,
            None if told == "auto" else told,
            [r for r, _ in self._models],
        )
        if device_bytes is None or None in self._facts:
            return share_unknown({role: roles.count(role) for role in roles}, self.ways, share=share)
        widths = [width_of(*model) for model in self._models]
        needs: dict[str, list[Need]] = {}
        for role, facts, width, scorer in zip(roles, self._facts, widths, [None, *self._scorers], strict=True):
            assert facts is not None
            num_engines = [num_slots * (max(widths) // one) for one in (widths[0], width)]
            needs.setdefault(role, []).append(self.need(facts, width, scorer, num_engines))

        def shared(trainer: TrainerMemory) -> Sharing:
            return share_device(
                needs, trainer, self.ways, device_bytes=device_bytes, free_bytes=machine.free_bytes, share=share
            )

        try:
            return shared(self._trainer)
        except ConfigError:
            if self._site.trains or self._trainer is NO_TRAINER:
                raise
            return replace(shared(NO_TRAINER), has_trainer=False)  # a preflight then computes on the host

    def need(self, facts: ModelFacts, width: int, scorer: ScoringModel | None, num_engines: Sequence[int]) -> Need:
        """`num_engines` of this machine: the policy's, and this model's."""
        config = self._config
        policies = num_engines[0] * self._site.layout.num_machines
        at_once, asked, new = sequences_at_once(config, policies), config.engine.max_model_len, config.max_tokens
        if scorer is not None:
            at_once = scored_at_once(at_once, *num_engines)
            asked, new = scorer.max_model_len, new + scorer.max_new_tokens
        longest = asked or min(facts.context_length or MAX_MODEL_LEN, MAX_MODEL_LEN)
        size = 4 if config.dtype == "float32" else 2
        return Need(facts, size, width, at_once, min(longest, PROMPT_TOKENS + new), longest)


def _of_preflight(policy: ModelFacts, config: RunConfig) -> TrainerMemory:
    """A model that only computes log-probabilities, one sequence at a time."""
    job = job_of(config, policy)
    states = trainer_memory(job, Way(1, 1)).parts
    weights = float(policy.num_params * job.bytes_per_value)
    logits = float(_LOGITS * policy.vocab_size * (job.prompt_tokens + job.max_tokens))
    parts: Mapping[str, float] = {"weights": weights, "logits": logits, "libraries": states["libraries"]}
    return TrainerMemory(parts, {"none": weights + states["libraries"]}, 0.0)


def _as_asked(ways: list[Shared], config: RunConfig) -> list[Shared]:
    """Those that the user allows; what is asked for and is not among them is as deep as there is."""
    engine = config.engine
    kept = [way for way in ways if engine.sleep in ("auto", way[0])] or ways
    if engine.offload != "auto" and any(way[0] for way in kept):
        asked = [way for way in kept if way[1] == engine.offload]
        kept = asked or [max((way for way in kept if way[0]), key=ways.index)]
    return kept
