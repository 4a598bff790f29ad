"""The settings of one run, validated: RunConfig learns from rollouts, TuneConfig from given examples.

`run.json` is such an object. TRL's other fields pass through `trl`, as `trl_fields` checks them.
"""

import math
import re
import shlex
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ycore.config.algorithms import Algorithm, find_algorithm
from ycore.errors import ConfigError, nearest
from ycore.foreign import foreign_text

Positive = Annotated[int, Field(gt=0, le=10**9, strict=True)]
Whole = Annotated[int, Field(ge=0, strict=True)]
"""A whole number that may be 0."""

Share = Annotated[float, Field(ge=0, le=1)]
Part = Annotated[float, Field(gt=0, le=1)]
"""A share above 0."""

Fraction = Annotated[float, Field(ge=0, lt=1)]
"""A share below 1."""

Count = Annotated[int, Field(gt=0, le=10**6, strict=True)]
"""A number of things at once. The limit keeps products of several such numbers small enough to factorise."""


Offload = Literal["none", "optimizer", "weights"]
"""Trainer state in host memory during a round; `weights` are the optimizer's state and frozen weights."""

Width = Literal["auto"] | Annotated[int, Field(gt=0, le=1024, strict=True)]
"""Devices that one engine spans (tensor parallelism); `auto` is the fewest that fit, and on a CPU 1."""


TEACHER = "teacher:"
"""The beginning of a source's name that is a teacher."""

TEACHER_MODEL = "teacher_model_name_or_path"
"""GOLD's teacher, in TRL's config."""

AGREES = "agrees:"
"""The beginning of a reward's name for which the policy is a judge of pairs."""

NO_ENVIRONMENT = "none"
"""The environment that a dataset of several names to be played in none."""


def _whole(text: str) -> str:
    if foreign_text(text) != text:
        raise PydanticCustomError("whole_text", "text without half of a character")
    return text


Said = Annotated[str, AfterValidator(_whole)]
"""Text that the policy reads."""


def _names_function(name: str) -> str:
    if not re.search(r"\.py:\w+$", name):
        raise PydanticCustomError("function_name", "file.py:function")
    return name


OwnFunctionName = Annotated[str, AfterValidator(_names_function)]
"""A function of one's own that the trainer calls."""


def _as_list(value: Any) -> Any:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


class Strict(BaseModel):
    """Unknown keys are refused, and values cannot be assigned."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True
    )


class RewardSandbox(Strict):
    """Reach of the process of one reward besides Python, the working folder and the reward's folder."""

    network: bool = False
    gpu: bool = False
    read: list[str] = []  # files and folders, shown read-only


class RewardConfig(Strict):
    """One reward source."""

    reward: str  # a built-in name, `file.py:function`, `package.module:function`, `judge:FILE.yaml`, `rm:MODEL`,
    # `agrees:FILE.yaml`; in `ycore distill` also `teacher:MODEL`
    weight: float = 1.0
    # Keyword arguments bound to the function; for a judge or a reward model, keys of its declaration.
    args: dict[str, Any] = {}
    strip_thinking: bool = False  # score completions without the text before `</think>`
    # The lowest and the highest value that the reward gives; a completion with any other is masked.
    range: tuple[float, float] | None = None
    sandbox: RewardSandbox = RewardSandbox()  # of a function of your own
    # True: not added to the others, but to be kept; `constraints` says how. Its weight is 0.
    constraint: bool = False
    least: float = 1.0  # a completion keeps the constraint where it gets so much or more
    limit: Fraction = 0.05  # share of completions that may break it (`lagrangian`)

    @model_validator(mode="before")
    @classmethod
    def _without_weight(cls, keys: Any) -> Any:
        if isinstance(keys, Mapping) and keys.get("constraint") is True:
            return {"weight": 0.0, **keys}
        return keys

    @property
    def kind(self) -> str:
        """Return what comes before its name, as `judge:` or `file.py:`; of a built-in reward the name."""
        place, colon, _ = self.reward.partition(":")
        return place + colon


class ConstraintSettings(Strict):
    """How the rewards that are constraints act (CGPO, arXiv 2409.20370)."""

    # `gate`: a completion that breaks one is worth nothing. `lagrangian`: it costs the constraint's weight, which
    # grows while more completions break it than its `limit`.
    by: Literal["gate", "lagrangian"] = "gate"
    rate: PositiveFloat = 1.0  # of `lagrangian`: what a weight gains a step where all break it
    start: NonNegativeFloat = 0.0  # of `lagrangian`: the weights at the start
    # Of `ycore online-dpo`: weight of the mean log-probability of the best completion's tokens (CODPO, eq. 14).
    likelihood: NonNegativeFloat = 0.0


class LoraSettings(Strict):
    """Low-rank adapters (arXiv 2106.09685), as peft names them."""

    r: Positive = 16
    alpha: Positive = 32
    dropout: Fraction = 0.0
    target_modules: str | list[str] = "all-linear"


class EngineSettings(Strict):
    """The rollout engines of one node."""

    # `auto` is vLLM where it is installed, else transformers inside the trainer.
    kind: Literal["auto", "vllm", "transformers"] = "auto"
    # Number of slots; `auto` is as many as the devices give, and on a CPU one per core, at most two.
    count: Literal["auto"] | Whole = "auto"
    # Other machines, by their names for ssh, all of whose devices hold engines of the policy.
    hosts: list[str] = []
    # GPUs, or cores of a CPU, that engines have to themselves: the last ones, and training has the others.
    devices: Literal["shared"] | Positive = "shared"
    # Move devices between training and engines where one side waits and the steps to come pay for the move.
    rebalance: bool = False
    # Devices, or cores of a CPU, that one engine of the policy spans; `auto`: the fewest that fit, on a CPU 1.
    tensor_parallel: Width = "auto"
    # Longest prompt plus completion, in tokens; None is 4096, or 2048 more than --max-tokens, within the model's context.
    max_model_len: Positive | None = None
    # KV cache of one engine on a CPU, all its workers together, in GiB; None derives it from the model and the batch.
    memory_gib: Positive | None = None
    # Share of a device's memory for an engine; `auto` derives each one's from the plan. A number is for each role in
    # turn where engines sleep, and else for rollouts and for all scorers together.
    gpu_memory_utilization: Literal["auto"] | Annotated[float, Field(gt=0, lt=1)] = "auto"
    # On a GPU: engines sleep while the trainer trains, and one role of a slot is awake at a time; `auto`: where they
    # and the trainer do not fit together.
    sleep: Literal["auto"] | bool = "auto"
    # What leaves a GPU for host memory during a round, where engines sleep; `auto`: no more than is needed.
    offload: Literal["auto"] | Offload = "auto"
    # Any other argument of vLLM's for the policy's engines, by vLLM's own name.
    args: dict[str, Any] = {}
    # Limit for an engine to become ready, and then for the trainer to reach its first step.
    start_timeout_s: PositiveFloat = 600.0
    # Limit for an engine to answer a request, including its retries; of a completion at least 1 s for 10 tokens.
    request_timeout_s: PositiveFloat = 600.0
    # How long an engine may be stopped, or not answer `/health`, before it is killed and started again.
    health_timeout_s: PositiveFloat = 60.0
    # What a sync sends: all weights with adapters merged, the adapters alone, or all weights without files: the engines
    # copy them from the trainer's memory. `auto` is `merged`, and `ipc` where /dev/shm is too small and one device trains.
    sync: Literal["auto", "merged", "adapter", "ipc"] = "auto"
    # Share of the policy's tensors and bytes that must be verified in an engine after each sync of weights.
    min_verified: Share = 1.0
    # Variables of the environment that engines get beside the usual ones: names, or beginnings such as `SLURM_*`.
    environment: list[str] = []
    # How often engines that died are started again in one run, all engines together; then the run fails.
    restarts: Whole = 3


class SamplingSettings(Strict):
    """Which groups a step trains on (dynamic sampling: DAPO, arXiv 2503.14476)."""

    # Replace groups whose rewards are all equal, because they have no gradient.
    dynamic: bool = True
    # A group whose rewards deviate by less than this share of their range does not teach: scaling would make it noise.
    std_threshold: Fraction = 1e-3
    # Groups drawn for each one needed, at most; then the step trains on fewer.
    max_tries: Positive = 4
    # Policy versions by which a surplus group of an earlier round may lag; 0 drops surplus groups.
    max_age: Annotated[int, Field(ge=0)] = 1
    # Steps by which the policy that writes a round may lag behind the one that learns from it. 1: a round is written
    # while the step before it trains. From 2 on, prompts are always in flight, and weights change between two tokens.
    max_staleness: Annotated[int, Field(ge=0, le=64, strict=True)] = 0
    # `ycore/effective_share` below which a stream begins its rounds later, so that newer weights write them; 0: never.
    min_effective_share: Fraction = 0.0
    # Share of a round's groups that are taken once more from the last rounds: those whose rewards differed most.
    reuse: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    # Groups in flight for each that is expected to be needed. Above 1 a round is over as soon as it has enough, and
    # completions that are not whole go on in the next (APRIL, arXiv 2509.18521).
    oversample: Annotated[float, Field(ge=1, le=4)] = 1.0
    # True: a prompt whose groups taught nothing is drawn less often. A column's name: the same, with each row's share
    # of right completions to begin with.
    curriculum: bool | str = False
    drop_after: Whole = 3  # solved groups in a row that drop a prompt; 0: never
    drop_at: Part = 1.0  # share of the best reward with which a group is solved
    least: Part = 0.1  # share of its positions at which any prompt is drawn; 1: at all


class RewardSettings(Strict):
    """The worker processes in which plain reward functions run."""

    workers: Positive = 2
    # Limit for one call; completions without a reward by then are masked and counted.
    deadline_s: PositiveFloat = 10.0
    # Memory of one worker and all that its rewards start, in GiB; a worker that holds more is ended.
    memory_gib: Annotated[float, Field(ge=0.5)] = 4.0


class SandboxSettings(Strict):
    """Where code runs that ycore did not bring: your reward functions, and programs that a model wrote."""

    # `auto` takes the strongest that works here. For programs of a model it never takes `none`.
    level: Literal["auto", "namespaces", "landlock", "none"] = "auto"


class TurnSettings(Strict):
    """Completions in several turns: how the policy acts, and what its tools and environment may take."""

    # `template`: it calls tools as its chat template shows them. `calls`: it writes `name(1, word="x")` on a line of
    # its own, and is answered as by a user. An environment whose only tool is `step(text)` gets whole turns. `auto`
    # takes `template` where the chat template shows tools, and else `calls`.
    actions: Literal["auto", "template", "calls"] = "auto"
    # Longest turn of the policy; None is what is left of the completion.
    max_tokens: Positive | None = None
    call_s: PositiveFloat = 10.0  # limit for one call; the policy is told that it took too long
    completion_s: PositiveFloat = 120.0  # limit for all calls of a completion, which then ends
    # Processes of tools and environments, at most: completions that are with one.
    at_once: Positive = 64
    memory_gib: Annotated[float, Field(ge=0.125)] = 1.0  # of each such process
    sandbox: RewardSandbox = RewardSandbox()  # of your own tools and environment


def a_fifth(steps: int) -> int:
    """Steps between checkpoints, and between evaluations, where a run does not say."""
    return math.ceil(steps / 5)


def is_one_file(dataset: str) -> bool:
    """Tell whether a dataset is one file, which has no splits."""
    return re.search(r"(?i)\.(jsonl?|csv|tsv|parquet)(\.gz)?$", dataset) is not None


def name_of(dataset: str) -> str:
    """Return the name of one dataset of several."""
    return dataset.rpartition("/")[2]


def _check_split(option: str, split: str | None, dataset: str | None) -> None:
    if split and is_one_file(dataset or ""):
        raise ConfigError(
            f"{option} {split}: {dataset} is a file, and has no splits; leave {option} out, or name another file"
        )


SHARDS_WEIGHTS = ("zero3", "fsdp2", "hsdp")
"""Names of `accelerate` under which no rank has a whole weight."""


class BaseConfig(Strict):
    """The settings that every run has."""

    algorithm: str  # a row of `algorithms.ALGORITHMS`, or `eval`
    model: str  # a hub id, a local folder, or the built-in name `smollm2-135m`
    # A hub id (`name` or `name:config`), a JSONL, CSV or Parquet file, `task:NAME?args` or `gym:NAME?args`. Empty for
    # environments that ask their own questions.
    dataset: str
    output: str  # the run's folder; it must be new, empty, or the same run's
    split: str = "train"
    limit: Positive | None = None  # rows to take from the dataset; None takes all
    trust_remote_code: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**32, strict=True)] = 0
    # What trainer and engine compute in; `auto` is bfloat16 where the machine multiplies it, else float32. Adapters and
    # full weights are kept in float32.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    # The same command gives the same run, to the bit, whatever else the machine does.
    deterministic: bool = False
    lora: LoraSettings | None = LoraSettings()  # None trains every weight
    # `4bit`: the frozen base of a LoRA run in NF4 (QLoRA, arXiv 2305.14314); engines get it whole, as rounded.
    quantize: Literal["4bit"] | None = None
    merge: bool = False  # also save the model with its adapters merged in; a reward model is always saved whole
    # Steps between checkpoints; None is a fifth of the run.
    checkpoint_every: Positive | None = None
    # Training ranks on this machine, each with its own share of the prompts; `auto` is one a GPU, and one on a CPU.
    processes: Literal["auto"] | Count = "auto"
    steps: Positive | None = None  # optimizer steps
    # `ddp`, `zero1`, `zero2`, `zero3`, `fsdp2`, `hsdp`, or an accelerate config file; None is `ddp` for several processes.
    accelerate: str | None = None
    trl: dict[str, Any] = {}  # any other field of TRL's config class, by TRL's own name

    @property
    def algorithm_row(self) -> Algorithm:
        """Its row of the table; ConfigError for an algorithm that TRL does not compute."""
        return find_algorithm(self.algorithm)

    @property
    def value_bytes(self) -> int:
        """Bytes of a number that trainer and engines compute with."""
        return 4 if self.dtype == "float32" else 2

    @property
    def has_trackers(self) -> bool:
        return self.trl.get("report_to") not in (None, "none", ["none"])

    def check(self) -> None:
        """Raise ConfigError where two keys contradict each other."""
        if self.trl.get("temperature") == 0 and self.algorithm != "eval":
            raise ConfigError(
                "temperature must be greater than 0 where a policy learns from what it samples; it is 0; leave it out"
            )
        if self.trl.get("sync_ref_model") and self.algorithm != "eval":
            self._check_moving_reference()
        for name, taken in (("logging_steps", 1), ("logging_strategy", "steps")):
            if self.trl.get(name, taken) != taken:
                raise ConfigError(
                    f"{name} is {self.trl[name]!r}, and each step is written to metrics.jsonl; leave it out"
                )
        if self.quantize is not None and self.accelerate in SHARDS_WEIGHTS:
            raise ConfigError(
                f"--quantize 4bit keeps the base whole on each rank, and {self.accelerate} shards it; take zero2"
            )
        if self.split != "train":
            _check_split("--split", self.split, self.dataset)

    def _check_moving_reference(self) -> None:
        """Refuse early what TRL's trainers refuse of `sync_ref_model` once the model is loaded."""
        beta = (self.algorithm_row.trl_defaults | self.trl).get("beta")
        rule = None
        if self.lora is not None:
            rule = "with adapters that is the base, which stays; say --full"
        elif not beta and isinstance(self, RunConfig):
            rule = "without beta there is none; say --beta 0.04"
        elif self.accelerate in SHARDS_WEIGHTS:
            rule = f"{self.accelerate} cuts up what a checkpoint must hold whole; say --accelerate zero2"
        if rule is not None:
            raise ConfigError(
                f"sync_ref_model moves the reference, and {rule}, or leave sync_ref_model out"
            )

    @property
    def code_files(self) -> dict[str, str]:
        """Paths that may be files of a person's code, by what they are for: rewards, and what answers the policy."""
        return {}


class RowSettings(Strict):
    """Where the columns of a dataset have names of their own."""

    prompt_column: str | None = None  # None looks for the columns of `data.rows.FORMS`
    # What sft learns, and what rewards get as `answer`; None looks for it.
    answer_column: str | None = None
    # The dataset's own name of any column: `{chosen: better, rejected: worse}`.
    columns: dict[str, str] = {}


class MixturePart(RowSettings):
    """One dataset of several; what it does not say is the run's."""

    dataset: str
    # Of the prompts, beside the shares of the others.
    share: PositiveFloat = 1.0
    split: str = "train"
    limit: Positive | None = None
    # Those of the run's rewards that score it; None is all.
    rewards: Annotated[list[str], Field(min_length=1)] | None = None
    # Which of the run's environments its prompts are played in, by name, or `none`; None is the run's only one, or what
    # each row names.
    environment: str | None = None
    # The estimator of its groups' advantages, among themselves; None takes the run's.
    advantage: str | None = None
    eval_dataset: str | None = None  # its held-out rows, with figures of their own

    @property
    def name(self) -> str:
        return name_of(self.dataset)


class ScoredConfig(BaseConfig):
    """A run that learns from rewards of what its model made."""

    rewards: Annotated[list[RewardConfig], Field(min_length=1)]
    prompts_per_step: Count = 8
    eval_every: Positive | None = None  # None is a fifth of the run
    eval_rewards: list[RewardConfig] = []  # what scores evaluations; empty takes `rewards`
    # Keep every round on disk, for `replay`; else rounds before the oldest checkpoint are dropped.
    keep_journal: bool = False
    # How often a trainer that died is started again, from the newest checkpoint and the journal.
    restarts: Whole = 0
    # Longest step, from its beginning to its row of metrics; then all stacks are written and the run fails.
    step_timeout_s: PositiveFloat = 3600.0
    sampling: SamplingSettings = SamplingSettings()
    reward_workers: RewardSettings = RewardSettings()
    sandbox: SandboxSettings = SandboxSettings()

    @property
    def reward_weights(self) -> list[float]:
        return [reward.weight for reward in self.rewards]

    @property
    def has_constraints(self) -> bool:
        return any(reward.constraint for reward in self.rewards)

    @property
    def code_files(self) -> dict[str, str]:
        return {
            f"reward {spec.reward}": spec.reward.rpartition(":")[0] for spec in self.rewards
        }


PLAIN_SAMPLING = {
    "temperature": (1.0,),
    "top_p": (1.0,),
    "top_k": (0, None),
    "min_p": (None, 0),
    "repetition_penalty": (1.0,),
}
"""Fields of TRL's, and their values where the policy samples from its own distribution."""


class ShownTurn(Strict):
    """A turn of a worked example."""

    role: Said
    content: Said


class RunConfig(ScoredConfig, RowSettings):
    """A run that learns from rollouts, or an evaluation."""

    algorithm: str = "grpo"
    # Several datasets, whose prompts are drawn by shares: a list under `dataset`, which then names them all.
    mixture: list[MixturePart] = []
    # What the policy may call: `file.py:function`, `package.module:function`, or `python`.
    tools: list[str] = []
    # What it acts in: `file.py:Class`, as TRL's `environment_factory`: `reset`, public methods, `get_reward`. Of
    # several, a row's column `environment` names its own: the NAME in `NAME=file.py:Class`, or else the class.
    env: Annotated[list[str], BeforeValidator(_as_list)] = []
    # Another Python for tools and environment, one with packages of its own.
    env_python: str | None = None
    # A command that is started once a completion, and talks to the policy as an OpenAI client.
    agent: str | None = None
    # Turns of the policy in a completion, where it has tools, an environment or an agent.
    max_turns: Positive = 8
    turns: TurnSettings = TurnSettings()
    system_prompt: Said | None = None
    # Turns before every prompt, after the system's: a worked example, `{role: user, content: ...}` and so on.
    few_shot: list[ShownTurn] = []
    # Completions of each prompt; TRL's `num_generations`. 1 is for advantages that do not compare within a group.
    group_size: Count = 8
    max_tokens: Positive = 256  # longest completion; TRL's `max_completion_length`
    # A run is refused where more of its first sampled completions are cut off at `max_tokens`; 1 refuses none.
    max_truncated: Part = 0.9
    log_every: Positive = 10  # steps from one table of completions in trackers to the next
    steps: Positive = 100
    # Rows that the policy is measured on before the first step, every `eval_every` steps and after the last.
    eval_dataset: str | None = None
    eval_split: str | None = None  # None is `test`
    eval_limit: Positive | None = None  # rows to take from it; None takes all
    # A figure of an evaluation, e.g. `pass@1`: its best model is kept in `best/`.
    keep_best: str | None = None
    # Ends a run early: `no-gain:N` evaluations, `nothing-to-learn:N` steps, `seconds:N`.
    stop_when: list[str] = []
    # Of the rewards that are marked as constraints.
    constraints: ConstraintSettings = ConstraintSettings()
    # The folder of a run whose journal provides the rounds: nothing is generated, and no engine is started.
    replay: str | None = None
    # How long ranks wait for each other in one exchange of a round. Training's own collectives have the step's limit.
    collective_timeout_s: PositiveFloat = 300.0
    # How rollouts and scorers share the slots: `colocated`, `dynamic`, or `split:3:1` with slots for each role.
    placement: str = "dynamic"
    engine: EngineSettings = EngineSettings()
    num_samples: Positive = 4  # completions of each prompt that is evaluated

    has_critic: ClassVar = False
    pairs_completions: ClassVar = False
    """Whether the loss compares completions of a group, so that micro-batches hold whole groups."""

    @property
    def has_turns(self) -> bool:
        """Whether something answers the policy between turns: tools, environments or an agent."""
        return bool(self.tools or self.env or self.agent is not None)

    @property
    def given_pairs(self) -> bool:
        """Whether the answers of the dataset's pairs are scored, and none are written."""
        return False

    @property
    def trains_a_judge(self) -> bool:
        """Whether the policy is asked about the dataset's pairs, as a judge."""
        return any(reward.kind == AGREES for reward in self.rewards)

    @property
    def pays_turns(self) -> bool:
        """Whether the advantage differs from turn to turn."""
        return False

    @property
    def own_functions(self) -> dict[str, str]:
        """Functions of one's own that the trainer calls, by the option that names each."""
        return {}

    @property
    def needs_greedy_baseline(self) -> bool:
        """Whether each prompt also gets a greedy completion, whose reward is the baseline."""
        return False

    @property
    def teacher_divergence(self) -> str:
        """The divergence from a teacher: `sampled` by its engines, or exact, in the trainer."""
        return "sampled"

    @property
    def teaches_exactly(self) -> bool:
        """Whether the trainer holds the teachers, and no engine does."""
        return self.teacher_divergence != "sampled"

    @property
    def uses_trl_advantages(self) -> bool:
        return False

    @property
    def teaches_alone(self) -> bool:
        """Whether every scored completion teaches, also in a group whose rewards are all equal.

        A critic's baseline is not the group's mean, and a teacher needs no group, so dynamic sampling then has nothing
        to replace but prompts that no reward could score. The same holds for groups of one.
        """
        return self.group_size == 1

    @property
    def learns_from_equal_rewards(self) -> str | None:
        """Name what gives a step a gradient where all rewards are equal; None where nothing does."""
        terms = ("beta", "entropy_coef", "use_adaptive_entropy")
        return next((f"{name} {self.trl[name]}" for name in terms if self.trl.get(name)), None)

    @property
    def environments(self) -> dict[str, str]:
        """The environments by name: the NAME of `NAME=file.py:Class`, or else the class."""
        by_name = {}
        for declared in self.env:
            named = re.fullmatch(r"([\w-]+)=(.+)", declared)
            reference = named[2] if named else declared
            name = named[1] if named else reference.partition("?")[0].rpartition(":")[2]
            by_name[name] = reference
        return by_name

    @property
    def code_files(self) -> dict[str, str]:
        tools = [("tool", name) for name in (*self.tools, *self.environments.values())]
        functions = [*self.own_functions.items(), *tools]
        return {
            **super().code_files,
            **{f"{kind} {name}": name.rpartition(":")[0] for kind, name in functions},
            **{f"agent {word}": word for word in shlex.split(self.agent or "")[1:]},
        }

    def environment_of(self, dataset: str | None, columns: Mapping[str, Any]) -> str | None:
        """Return the name of a row's environment, as its dataset or the row says; None where the run has none."""
        for part in self.mixture:
            is_of_part = dataset in (part.name, name_of(part.eval_dataset or ""))
            if is_of_part and part.environment is not None:
                return part.environment
        return (
            columns["environment"] if len(self.env) > 1 else next(iter(self.environments), None)
        )

    @property
    def unscored(self) -> dict[str, set[int]]:
        """The indices of the rewards that are not for a dataset, of several."""
        return {
            part.name: {
                index
                for index, spec in enumerate(self.rewards)
                if part.rewards is not None and spec.reward not in part.rewards
            }
            for part in self.mixture
        }

    def first_reward_of(self, dataset: str) -> int:
        """Return the index of the first reward that is for a dataset, of several: its 1 says that an answer is right."""
        unscored = self.unscored.get(dataset, set())
        return next(index for index in range(len(self.rewards)) if index not in unscored)

    def for_evaluation(self) -> "EvalConfig | None":
        """Return the settings of an evaluation on the held-out rows; None where the run has none."""
        whole = MixturePart(dataset="", eval_dataset=self.eval_dataset)
        parts = [
            part.model_copy(
                update={
                    "dataset": name,
                    "split": "train" if is_one_file(name) else self.eval_split or "test",
                    "limit": self.eval_limit,
                    "rewards": self._eval_rewards_of(part),
                }
            )
            for part in (*self.mixture, whole)
            if (name := part.eval_dataset)
        ]
        if not parts:
            return None
        is_one = self.eval_dataset and len(parts) == 1
        shared = {name: getattr(self, name) for name in RunConfig.model_fields}
        rows = {
            "dataset": " + ".join(part.dataset for part in parts),
            "split": parts[0].split if is_one else "train",
            "limit": self.eval_limit,
            "mixture": [] if is_one else parts,
        }
        rewards = self.eval_rewards or self.rewards
        return EvalConfig.model_construct(
            **shared | rows | {"algorithm": "eval", "rewards": rewards}
        )

    def _eval_rewards_of(self, part: MixturePart) -> list[str] | None:
        """Return the rewards of an evaluation for a dataset's held-out rows: all but those that train other datasets
        alone. None is all."""
        if not self.eval_rewards or part.rewards is None:
            return part.rewards
        others = {spec.reward for spec in self.rewards} - {*part.rewards}
        return [spec.reward for spec in self.eval_rewards if spec.reward not in others] or None

    def check(self) -> None:
        super().check()
        _check_split("--eval-split", self.eval_split, self.eval_dataset)
        if NO_ENVIRONMENT in self.environments:
            raise ConfigError(
                f"an environment of {', '.join(self.env)} has the name none, which is to have no environment; take another"
            )
        if len(self.environments) < len(self.env):
            raise ConfigError(
                f"two environments of {', '.join(self.env)} have one name; give them names: --env NAME=file.py:Class"
            )
        self._check_unread()
        self._check_mixture()
        self._check_policy_as_judge()
        self._check_carried()
        if self.sampling.min_effective_share and not self.streams:
            raise ConfigError(
                f"sampling.min_effective_share is {self.sampling.min_effective_share:g}, and it delays the rounds of a "
                "stream; give --max-staleness 2 or more without --deterministic, or leave it out"
            )
        self._check_drafts()
        if self.algorithm != "eval":
            self._check_aggregation()
        if self.sampling.curriculum and self.teaches_alone:
            raise ConfigError(
                "--curriculum learns which groups teach, and here every completion does; leave it out, or take ycore "
                "grpo with --group-size 2 or more"
            )

    def _check_unread(self) -> None:
        """Refuse a setting that nothing of this run reads."""
        turns = self.has_turns, "--tools, --env or --agent"
        readers = {
            "max_turns": turns,
            "turns": turns,
            "env_python": turns,
            "log_every": (self.has_trackers, "--report-to"),
            "constraints": (self.has_constraints, "--constraint"),
        }
        for key, value in self.model_dump(include=set(readers), exclude_defaults=True).items():
            is_read, option = readers[key]
            if not is_read:
                raise ConfigError(
                    f"{key} is {value!r}, and without {option} nothing reads it; give {option}, or leave it out"
                )

    def _check_aggregation(self) -> None:
        normalizes = self.trl.get("multi_objective_aggregation") == "normalize_then_sum"
        if normalizes and (self.has_constraints or not self.uses_trl_advantages):
            raise ConfigError(
                "multi_objective_aggregation=normalize_then_sum is of TRL's own advantages, and here ycore computes them; "
                "leave it out, or take ycore grpo without --constraint and with --advantage group for all datasets"
            )

    def _check_mixture(self) -> None:
        measured = self.for_evaluation()
        for mixture in (self.mixture, measured.mixture if measured else []):
            names = [part.name for part in mixture]
            if len(set(names)) < len(names):
                raise ConfigError(
                    f"the datasets of a run are told apart by their names, and they are {', '.join(names)}; rename one"
                )
        rewards = [reward.reward for reward in self.rewards]
        environments = [*self.environments, NO_ENVIRONMENT]
        for part in self.mixture:
            named = [(name, "reward", rewards) for name in part.rewards or ()]
            if part.environment is not None:
                named.append((part.environment, "environment", environments))
            for name, kind, known in named:
                if name not in known:
                    way_out = nearest(name, known) or f"; take {' or '.join(known)}"
                    raise ConfigError(
                        f"{part.name} names the {kind} {name!r}, which the run has not{way_out}"
                    )

    def _check_policy_as_judge(self) -> None:
        judges = [reward.reward for reward in self.rewards if reward.kind == AGREES]
        if judges and self.mixture:
            raise ConfigError(f"{judges[0]} reads pairs of one dataset; give one --dataset")
        if len(judges) > 1:
            raise ConfigError(
                f"the policy is asked as one judge, and the rewards are {' and '.join(judges)}; leave one"
            )
        if judges and (self.has_turns or self.system_prompt is not None or self.few_shot):
            raise ConfigError(
                f"{judges[0]} asks the judge's own question, in one turn; leave out --tools, --env, --agent, "
                "system_prompt and few_shot"
            )

    @property
    def streams(self) -> bool:
        """Whether completions are written on while weights change."""
        return self.sampling.max_staleness > 1 and not self.deterministic

    def _check_carried(self) -> None:
        if self.sampling.oversample == 1:
            return
        if self.sampling.max_staleness > 1:
            raise ConfigError(
                f"--max-staleness {self.sampling.max_staleness} keeps engines busy from round to round; leave "
                "--oversample out"
            )
        rule = "with --oversample a completion may take several rounds"
        if self.has_turns:
            raise ConfigError(
                f"{rule}, and tools, environments and agents answer within one; leave --oversample out"
            )
        if self.deterministic:
            raise ConfigError(
                f"{rule}, and which do depends on what ends first; leave --deterministic or --oversample out"
            )

    def _check_drafts(self) -> None:
        if "speculative_config" not in self.engine.args:
            return
        if self.deterministic:
            raise ConfigError(
                "drafts depend on the requests in flight, and change a seed's tokens; leave --deterministic or "
                "engine.args.speculative_config out"
            )
        if self.trl.get("min_p"):
            raise ConfigError(
                "vLLM does not apply min_p to drafted tokens; leave --min-p or engine.args.speculative_config out"
            )

    @property
    def changed_sampling(self) -> dict[str, Any]:
        """TRL's fields by which engines sample from another distribution than the policy's own, with their values."""
        return {
            name: self.trl[name]
            for name, plain in PLAIN_SAMPLING.items()
            if name in self.trl and self.trl[name] not in plain
        }

    def sampling_warnings(self) -> list[str]:
        """Say, a line each, where engines sample what the trainer does not score, and which field has no effect."""
        lines = []
        changed = self.changed_sampling
        changed.pop("temperature", None)  # the trainer divides its logits by it as well
        if changed:
            named = ", ".join(f"{name} {value:g}" for name, value in changed.items())
            lines.append(
                f"{named}: engines sample from a changed distribution, and the trainer scores tokens by the whole one; "
                "each token's weight falls to the share of probability that was left to sample from (the metric "
                f"sampling/importance_sampling_ratio/mean, 1 is right); leave {' and '.join(changed)} out"
            )
        if self.trl.get("generation_kwargs"):
            lines.append(
                f"generation_kwargs {self.trl['generation_kwargs']} has no effect; give temperature, top_p, top_k, "
                "min_p and repetition_penalty by their own options"
            )
        return lines


class EvalConfig(RunConfig):
    """A run of `ycore eval`."""

    algorithm: str = "eval"
    pairs: bool = False  # score the better and the worse answer of each row; nobody writes any

    @property
    def given_pairs(self) -> bool:
        return self.pairs

    @property
    def teaches_alone(self) -> bool:
        return False

    def check(self) -> None:
        super().check()
        trackers = self.trl.get("report_to") or ""
        if self.has_trackers and "wandb" not in trackers and "all" not in trackers:
            raise ConfigError(
                f"ycore eval sends its figures to wandb alone, not {trackers}; say --report-to wandb"
            )
        if not self.pairs:
            return
        if self.has_turns:
            raise ConfigError(
                "--pairs scores answers that are written; leave --tools, --env and --agent out"
            )
        for reward in self.rewards:
            is_of_policy = reward.reward in ("reference_probability", "environment")
            if is_of_policy or reward.kind in (TEACHER, AGREES):
                raise ConfigError(
                    f"--pairs has no policy that writes, and {reward.reward} is of one; "
                    "give judge:FILE.yaml, rm:MODEL or a function"
                )


class TuneConfig(BaseConfig, RowSettings):
    """A run that learns from given examples."""

    # Where held-out rows come from; None takes them from `dataset`.
    eval_dataset: str | None = None
    # The split of the held-out rows; None splits `dataset` so that no prompt is on both sides.
    eval_split: str | None = None
    # Rows to measure on before the first step, every `eval_every` steps and after the last. None is a tenth of the
    # rows, at most 256; 0 measures nothing.
    held_out: Whole | None = None
    # None: a fifth of the run where the next two ask, else only the two ends.
    eval_every: Positive | None = None
    # A figure of the held-out rows, e.g. `loss`: its best model is kept in `best/`.
    keep_best: str | None = None
    stop_when: list[str] = []  # ends a run early: `no-gain:N` evaluations, `seconds:N`
    # Rows (a pair is one) in an optimizer step, over all ranks; None is 8, or the product of TRL's batch fields.
    batch_size: Positive | None = None
    epochs: PositiveFloat = 1.0  # passes over the rows; `steps` wins
    steps: Positive | None = None  # optimizer steps; None derives them from `epochs`

    def check(self) -> None:
        super().check()
        _check_split("--eval-split", self.eval_split, self.eval_dataset or self.dataset)

    @property
    def measures_between(self) -> bool:
        """Whether held-out rows are measured between the first step and the last."""
        return bool(self.eval_every or self.keep_best or self.stop_when)


class ExperimentalConfig(TuneConfig):
    """A run of one of TRL's experimental trainers."""

    reward: str | None = None  # sdpo's: it scores in the trainer's process

    @property
    def writes(self) -> bool:
        """Whether the trainer learns from completions that it writes itself, by transformers."""
        return self.algorithm not in ("orpo", "cpo")

    @property
    def code_files(self) -> dict[str, str]:
        return {f"reward {self.reward}": self.reward.rpartition(":")[0]} if self.reward else {}

    def check(self) -> None:
        super().check()
        if self.algorithm == "gold" and not self.trl.get(TEACHER_MODEL):
            raise ConfigError(
                "ycore gold needs a teacher; say --teacher-model-name-or-path MODEL, a folder or a hub id"
            )
        if self.trl.get("teacher_model_kind") == "ema":
            raise ConfigError(
                "teacher_model_kind=ema moves a teacher that TRL's checkpoints leave out, so no run could go on; take "
                "live or base"
            )
        if (self.algorithm == "sdpo") != (self.reward is not None):
            raise ConfigError(
                f"reward={self.reward}: ycore sdpo needs one, a name or file.py:function, and only it takes one; "
                "e.g. ycore sdpo --set reward=exact_answer"
            )


AnyConfig = RunConfig | TuneConfig
