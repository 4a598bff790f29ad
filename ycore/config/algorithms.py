"""The table of algorithms. Commands, configs and trainers are made from its rows.

A new algorithm costs one file in `ycore/trl` and one row here. This file imports nothing heavy, because
`ycore --help` lists the table.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ycore.config.trl_fields import TrlField, fields_of
from ycore.errors import ConfigError, nearest


@dataclass(frozen=True, kw_only=True)
class AlgorithmEntry:
    """The part of an algorithm that its config is made by, and that messages name."""

    name: str  # the command, and the value of `algorithm` in run.json
    config_class: str  # `module:attribute` of the class that validates its runs, a BaseConfig
    model: str = "smollm2-135m"  # examples of options, for messages
    dataset: str
    reward: str = "exact_answer"
    trl_config: str | None = None  # TRL's config class, whose fields are options

    @property
    def trl_fields(self) -> Mapping[str, TrlField]:
        """The fields of TRL's config class, by name; none of a family."""
        return fields_of(self.trl_config) if self.trl_config else {}

    @property
    def config(self) -> Any:
        """The class that validates its runs, a BaseConfig."""
        return load_reference(self.config_class)


@dataclass(frozen=True, kw_only=True)
class Algorithm(AlgorithmEntry):
    """An algorithm that one of TRL's trainers computes."""

    trl_config: str
    summary: str  # the first line of `--help`
    help: str  # the next lines of `--help`: the columns it reads, and an example of a field of TRL's
    examples: tuple[str, ...]  # command lines for `--help`, without `ycore NAME`
    learns_from: Literal["rollouts", "examples"]
    trainer: str  # `module:attribute` of its trainer's class, or of a function that chooses it by the config
    # Options of runs with rollouts that its config class has no key for.
    lacks: tuple[str, ...] = ()
    learning_rate: float  # the default for every weight; TRL's own default serves one of the two kinds of weights only
    # The default for adapters, which start at zero and need larger steps.
    lora_learning_rate: float
    settings: Mapping[str, Any] = field(default_factory=dict)  # keys under every other layer
    # An example is an answer, a better and a worse answer, or an answer with a label.
    rows: Literal["answers", "pairs", "labelled"] | None = None
    # Figures of held-out rows that `--keep-best` may compare; the first is what `--stop-when no-gain` compares.
    figures: tuple[str, ...] = ()
    sequences_per_row: int = 1  # sequences that the trainer runs for one row
    min_micro_batch: int = 1  # the fewest rows in a micro-batch
    # Whether the result is a reward model instead of a policy.
    trains_reward_model: bool = False
    # Whether TRL may change it at any time; `ycore --help` does not list it.
    experimental: bool = False

    @property
    def trl_defaults(self) -> dict[str, Any]:
        """The defaults of TRL's fields, as the algorithm changes them."""
        defaults = {name: field.default for name, field in self.trl_fields.items()}
        return {**defaults, **self.settings.get("trl", {})}


@dataclass(frozen=True, kw_only=True)
class AlgorithmFamily(AlgorithmEntry):
    """An algorithm that brings its own config class, trainer and command, because TRL has no trainer for it.

    Its model is a folder.

    Its parts are references, `module:attribute`, which `load_reference` imports when they are used. A new family is a
    package, and a row of `FAMILIES`.
    """

    run: str  # called with the run's folder in the trainer's process; `trainer.__main__.AlgorithmRun`
    command: str  # the Typer command
    plan: str  # called with the config, `resume` and `how`; returns JSON values, as `training_plan` does
    # Called with the config, its plan and `resume`; the rows that a person reads.
    plan_rows: str
    closing_rows: str  # called with the config of a finished run


def load_reference(reference: str) -> Any:
    """Import `module:attribute`."""
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


_GRPO = Algorithm(
    name="grpo",
    summary="Train a model on a reward with GRPO.",
    help="Any field of TRL's GRPOConfig is an option too, e.g. --learning-rate 1e-5; see docs/options.md.",
    examples=(
        "--recipe quickstart",
        "--model Qwen/Qwen2.5-0.5B-Instruct --dataset train.jsonl \\\n"
        "           --reward rewards.py:score --output runs/first --steps 200",
    ),
    config_class="ycore.config.learners:GroupConfig",
    learns_from="rollouts",
    trl_config="GRPOConfig",
    trainer="ycore.trl.grpo:choose_group_trainer",
    lacks=("teacher",),
    dataset="'task:addition?digits=1'",
    learning_rate=1e-6,
    lora_learning_rate=2e-5,
)
_SFT = Algorithm(
    name="sft",
    summary="Fine-tune a model on given answers.",
    help=(
        "Columns: messages; or prompt and completion (question and answer, instruction and output);\n"
        "or text. Any field of TRL's SFTConfig is an option too, e.g. --max-length 2048."
    ),
    examples=(
        "--recipe sft-chat",
        "--model smollm2-135m --dataset chats.jsonl --output runs/sft",
    ),
    config_class="ycore.config.schema:TuneConfig",
    learns_from="examples",
    trl_config="SFTConfig",
    trainer="ycore.trl.given_examples:FineTuner",
    dataset="chats.jsonl",
    learning_rate=2e-5,
    lora_learning_rate=2e-4,
    rows="answers",
    figures=("loss", "mean_token_accuracy"),
)
# TRL's own advantages are replaced, and its deviation of a group of one would not exist.
_OWN_ADVANTAGES = {"trl": {"loss_type": "dapo", "scale_rewards": "none"}}
_ROWS = (
    _GRPO,
    replace(
        _GRPO,
        name="ppo",
        summary="Train a model on a reward with PPO, with a critic.",
        help=(
            "Every field of TRL's GRPOConfig is an option too; the critic's are --set critic.NAME=VALUE.\n"
            "Presets: ppo-n-plus, vapo, bpco, ma-rlhf; see docs/algorithms.md."
        ),
        examples=(
            "--recipe ppo-quickstart",
            "--recipe ppo-quickstart --preset vapo --group-size 1",
        ),
        config_class="ycore.config.learners:PPOConfig",
        trainer="ycore.trl.ppo:Trainer",
        lacks=("teacher", "advantage"),
        settings=_OWN_ADVANTAGES,
    ),
    replace(
        _GRPO,
        name="distill",
        summary="Train a model towards a teacher's probabilities.",
        help=(
            "The policy writes, and the teacher says how likely each token is (on-policy distillation). Rewards\n"
            "are added where given. --set distill.divergence=forward-kl takes an exact divergence, or js. Every field\n"
            "of TRL's GRPOConfig is an option too; see docs/algorithms.md."
        ),
        examples=(
            "--recipe distill-quickstart --teacher runs/quickstart",
            "--model smollm2-135m --dataset prompts.jsonl \\\n"
            "              --teacher HuggingFaceTB/SmolLM2-1.7B-Instruct",
        ),
        config_class="ycore.config.learners:DistillConfig",
        trainer="ycore.trl.distill:Trainer",
        lacks=("constraint", "keep", "loss"),
        lora_learning_rate=1e-4,  # as in Thinking Machines' on-policy distillation
        settings=_OWN_ADVANTAGES,
    ),
    replace(
        _GRPO,
        name="online-dpo",
        summary="Train a model on its own best and worst completions.",
        help=(
            "Rewards, judges or reward models choose the best and the worst completion of each group; DPO's loss\n"
            "learns from the two. --set loss_from=ipo or rrhf takes another loss; --beta is DPO's."
        ),
        examples=(
            "--recipe quickstart --beta 0.1",
            "--recipe judge-chat --beta 0.1 --set loss_from=ipo",
        ),
        config_class="ycore.config.learners:OnlineDPOConfig",
        trainer="ycore.trl.online_dpo:Trainer",
        lacks=("teacher", "advantage", "keep", "loss", "preset", "divergence", "trust_region"),
        settings={"trl": {"beta": 0.1, "scale_rewards": "none"}},
    ),
    _SFT,
    replace(
        _SFT,
        name="reward",
        summary="Train a reward model on pairs of better and worse answers.",
        help=(
            "Columns: chosen and rejected, with or without prompt. Dialogues written as one text,\n"
            "Human: ... Assistant: ..., are split into turns. The summary has the accuracy on held-out pairs.\n"
            "Any field of TRL's RewardConfig is an option too, e.g. --center-rewards-coefficient 0.01."
        ),
        examples=(
            "--recipe hh-reward",
            "--model smollm2-135m --dataset pairs.jsonl --output runs/rm",
        ),
        trl_config="RewardConfig",
        trainer="ycore.trl.given_examples:RewardModelTrainer",
        dataset="pairs.jsonl",
        learning_rate=1e-5,  # TRL's 1e-4 on every weight of a reward model makes it forget its pretraining
        lora_learning_rate=1e-4,
        rows="pairs",
        figures=("loss", "accuracy", "margin"),
        sequences_per_row=2,
        trains_reward_model=True,
    ),
    replace(
        _SFT,
        name="dpo",
        summary="Train a model on pairs of better and worse answers.",
        help=(
            "Columns: chosen and rejected, with or without prompt. Dialogues written as one text,\n"
            "Human: ... Assistant: ..., are split into turns.\n"
            "Any field of TRL's DPOConfig is an option too, e.g. --loss-type ipo, --beta 0.05."
        ),
        examples=(
            "--recipe hh-dpo",
            "--model runs/sft/model --dataset pairs.jsonl --output runs/dpo",
        ),
        trl_config="DPOConfig",
        trainer="ycore.trl.given_examples:PairTrainer",
        dataset="pairs.jsonl",
        learning_rate=1e-6,
        lora_learning_rate=2e-5,
        rows="pairs",
        figures=("loss", "rewards/accuracies", "rewards/margins"),
        sequences_per_row=2,
    ),
    replace(
        _SFT,
        name="kto",
        summary="Train a model on answers that are labelled good or bad.",
        help=(
            "Columns: prompt, completion and label (true or false); or those of pairs, which are split in two.\n"
            "Any field of TRL's KTOConfig is an option too, e.g. --undesirable-weight 1.5."
        ),
        examples=(
            "--model smollm2-135m --dataset labelled.jsonl --output runs/kto",
            "--model runs/sft/model --dataset pairs.jsonl --dry-run",
        ),
        trl_config="KTOConfig",
        trainer="ycore.trl.given_examples:LabelTrainer",
        dataset="labelled.jsonl",
        learning_rate=1e-6,
        lora_learning_rate=2e-5,
        rows="labelled",
        figures=("loss", "rewards/margins"),
        sequences_per_row=2,  # the answer, and another row's answer for the KL term
        min_micro_batch=2,  # the KL term pairs every prompt with another row's answer
    ),
)


def _experimental(base: Algorithm, name: str, *, reads: str, needs: str = "") -> Algorithm:
    """Make the row of one of TRL's experimental trainers, which has the name of its module.

    Args:
        base: the algorithm whose rows it reads.
        reads: its columns, for `--help`.
        needs: options that it cannot do without.
    """
    return replace(
        base,
        name=name,
        summary=f"Train a model with TRL's experimental {name.upper()}Trainer.",
        help=(
            f"Columns: {reads}.\n"
            f"Any field of TRL's {name.upper()}Config is an option too; see docs/trainers.md."
        ),
        examples=(
            f"--model smollm2-135m --dataset {base.dataset} {needs}--output runs/{name}",
        ),
        config_class="ycore.config.schema:ExperimentalConfig",
        trl_config=f"{name.upper()}Config",
        trainer="ycore.trl.experimental:choose_experimental_trainer",
        figures=("loss",),
        experimental=True,
    )


_TEACHER = "--teacher-model-name-or-path MODEL "
_PAIRS = "chosen and rejected, with or without prompt"
_DPO = next(row for row in _ROWS if row.name == "dpo")
_EXPERIMENTAL = (
    _experimental(_DPO, "orpo", reads=_PAIRS),
    _experimental(_DPO, "cpo", reads=_PAIRS),
    _experimental(_SFT, "gold", reads="messages, or prompt and completion", needs=_TEACHER),
    _experimental(_SFT, "sdft", reads="prompt and completion, which only the teacher sees"),
    replace(
        _experimental(
            _SFT,
            "sdpo",
            reads="prompt and completion, the right answer for the reward",
            needs="--set reward=exact_answer ",
        ),
        settings={"trl": {"teacher_model_kind": "live"}},  # TRL's ema has no checkpoint
    ),
)

_EVAL = replace(_GRPO, name="eval", config_class="ycore.config.schema:EvalConfig")
"""An evaluation samples with GRPO's settings."""

ALGORITHMS = {row.name: row for row in (*_ROWS, *_EXPERIMENTAL)}

FAMILIES = {
    "flow": AlgorithmFamily(
        name="flow",
        config_class="ycore.flow.flow_settings:FlowConfig",
        model="models/flow-digits",
        dataset="prompts.jsonl",
        reward="rewards.py:score",
        run="ycore.flow.flow_run:FlowRun",
        command="ycore_cli.flow:flow",
        plan="ycore_cli.flow:flow_plan",
        plan_rows="ycore_cli.flow:flow_plan_rows",
        closing_rows="ycore_cli.flow:flow_closing_rows",
    )
}

ENTRIES: Mapping[str, AlgorithmEntry] = {**ALGORITHMS, "eval": _EVAL, **FAMILIES}


def find_algorithm(name: object) -> Algorithm:
    """Return the row of a config's `algorithm`; ConfigError for an unknown one, or one that TRL does not compute."""
    entry = find_entry(name)
    if not isinstance(entry, Algorithm):
        raise ConfigError(
            f"a run of ycore {name} is for `ycore {name}` and `ycore resume`; say ycore {name} --recipe NAME"
        )
    return entry


def find_entry(name: object) -> AlgorithmEntry:
    """Return the entry of any algorithm, or of `eval`; ConfigError for an unknown one."""
    if name not in ENTRIES:
        raise ConfigError(
            f"algorithm must be one of {', '.join(ENTRIES)}; it is {name!r}{nearest(str(name), ENTRIES, limit=1)}"
        )
    return ENTRIES[str(name)]


def commands_with(key: str) -> list[str]:
    """Name the algorithms whose configs have this key."""
    return [entry.name for entry in ENTRIES.values() if key in entry.config.model_fields]
