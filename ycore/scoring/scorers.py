"""The classes that score a run's rewards, and the scoring of a run built from its config."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ycore.config.algorithms import load_reference
from ycore.config.schema import AGREES, TEACHER, RewardConfig, RunConfig, ScoredConfig
from ycore.data.prompts import PromptSet
from ycore.engine.kinds import EngineKind
from ycore.errors import ConfigError, RewardError
from ycore.judge.declaration import JUDGE_PREFIX, REWARD_MODEL_PREFIX, teachers_of
from ycore.placement.placement import JUDGE, ROLLOUT, check_placement, in_order, parse_placement
from ycore.rewards.builtin import CODE, ENVIRONMENT, REFERENCE
from ycore.rewards.loading import reward_names
from ycore.run.files import RunFolder
from ycore.scoring.scoring import (
    Policy,
    Scorer,
    ScorerContext,
    ScorerEngines,
    Scoring,
    ServedModel,
    rule_scorers,
)

SCORERS: Mapping[str, str] = {
    JUDGE_PREFIX: "ycore.scoring.judge_scorer:JudgeScorer",
    AGREES: "ycore.scoring.judge_scorer:AgreementScorer",
    REWARD_MODEL_PREFIX: "ycore.scoring.model_scorers:RewardModelScorer",
    TEACHER: "ycore.scoring.model_scorers:TeacherScorer",
    REFERENCE: "ycore.scoring.model_scorers:ReferenceScorer",
    ENVIRONMENT: "ycore.scoring.model_scorers:EnvironmentScorer",
    CODE: "ycore.scoring.code_scorer:CodeScorer",
}
"""The kinds of rewards that are no functions in worker processes; a class is imported for a run that has such a reward."""


def scorer_class(spec: RewardConfig) -> type[Scorer]:
    """Import the class that scores the reward."""
    scorer: type[Scorer] = load_reference(
        SCORERS.get(spec.kind, "ycore.scoring.scoring:RuleScorer")
    )
    return scorer


def is_rule(spec: RewardConfig) -> bool:
    """Return whether the reward is a plain function, for the worker processes."""
    return spec.kind not in SCORERS


def runs_unknown_code(config: ScoredConfig) -> bool:
    """Return whether a reward runs code that ycore did not bring: a function of the user's, or what the policy wrote."""
    return any(
        spec.kind == CODE or (is_rule(spec) and ":" in spec.reward) for spec in config.rewards
    )


def served_models(config: RunConfig) -> list[ServedModel]:
    """Return the policy, then every model that scores this run in an engine of ycore's.

    Rewards that use the same model in the same role share its engines. A model with a `base_url` needs none.
    """
    policy = ServedModel(
        ROLLOUT,
        config.model,
        max_model_len=config.engine.max_model_len,
        tensor_parallel=config.engine.tensor_parallel,
    )
    models = {(ROLLOUT, config.model): policy}
    for source, spec in enumerate(config.rewards):
        for model in scorer_class(spec).models(spec, config):
            key = (model.role, model.name)
            model = replace(model, sources=(source,))
            models[key] = _merge(models[key], model) if key in models else model
    return list(models.values())


def first_scorer(models: Sequence[ServedModel]) -> ServedModel | None:
    """Return the first model after the policy; a judge comes before any other."""
    return min(models[1:], key=lambda model: model.role != JUDGE, default=None)


def own_teachers(config: RunConfig) -> list[str]:
    """Return the teachers that every rank of the trainer holds itself."""
    if not config.teaches_exactly:
        return []
    return [teacher.model for teacher in teachers_of(config)]


def check_run_placement(
    config: RunConfig, models: Sequence[ServedModel], *, num_slots: int | None = None
) -> None:
    """ConfigError where the models' roles cannot be placed so on `num_slots`, None where these are not known yet."""
    placement = parse_placement(config.placement)
    roles = in_order([model.role for model in models])
    check_placement(
        placement,
        roles=roles,
        num_slots=sum(placement.shares) if num_slots is None else num_slots,
    )


def _merge(model: ServedModel, other: ServedModel) -> ServedModel:
    lengths = [model.max_model_len, other.max_model_len]
    widths = [
        width for width in (model.tensor_parallel, other.tensor_parallel) if width != "auto"
    ]
    return replace(
        model,
        sources=model.sources + other.sources,
        max_model_len=None if None in lengths else max(filter(None, lengths)),
        max_new_tokens=max(model.max_new_tokens, other.max_new_tokens),
        tensor_parallel=max(widths, default="auto"),
    )


def check_rows(config: RunConfig, prompts: PromptSet) -> None:
    """Raise UserError where a reward cannot be loaded, or the dataset lacks what it reads."""
    for name, part in (prompts.parts or {"": prompts}).items():
        for index, spec in enumerate(config.rewards):
            if index in config.unscored.get(name, ()):
                continue
            try:
                scorer_class(spec).check_rows(spec, config, part)
            except RewardError as problem:
                raise RewardError(f"{name}: {problem}".removeprefix(": ")) from None


def check_models(config: RunConfig, *, engine: EngineKind) -> list[str]:
    """Return a line for each model that scores; nothing is started. UserError where one cannot score this run."""
    lines = []
    if config.algorithm != "eval":
        _check_comparisons(config)
    for spec in config.rewards:
        lines += scorer_class(spec).check_models(spec, config, engine=engine)
    return lines


def _check_comparisons(config: RunConfig) -> None:
    """Raise ConfigError for a reward that compares a group where completions are scored alone."""
    if config.needs_greedy_baseline:
        rule = "--advantage remax scores a prompt's greedy completion alone"
        way_out = "another advantage"
    elif config.group_size == 1:
        rule = "group_size is 1"
        way_out = "--group-size 8"
    else:
        return
    for spec in config.rewards:
        if (spec.weight or spec.constraint) and scorer_class(spec).compares(spec):
            raise ConfigError(
                f"{spec.reward} compares the completions of a group, and {rule}; take another reward, or {way_out}"
            )


def check_images(config: RunConfig) -> None:
    """ConfigError where a part of the run would not see the images of its prompts, and would judge without them."""
    problems = {
        spec.reward: problem
        for spec in config.rewards
        if (problem := scorer_class(spec).image_problem(spec, config)) is not None
    }
    if config.has_turns:
        problems["a run with tools, an environment or an agent"] = "writes prompts of text"
    if config.streams or config.sampling.oversample > 1:
        option = "--max-staleness above 1" if config.streams else "--oversample"
        problems[f"a run with {option}"] = "goes on with what was written after text only"
    if config.algorithm not in ("grpo", "rloo", "eval"):
        problems[f"ycore {config.algorithm}"] = (
            "has parts that read text only; take ycore grpo or ycore rloo"
        )
    for part, problem in problems.items():
        raise ConfigError(
            f"the prompts have pictures, and {part} {problem}; leave it out, or remove the pictures"
        )


def build_scoring(
    config: RunConfig, folder: RunFolder, started: Sequence[ScorerEngines], *, policy: Policy
) -> Scoring:
    """Build the scorers of all rewards, with clients for the machine's engines. Call `start` before use.

    `started` are the engines of judges, reward models and teachers.
    """
    context = ScorerContext(config, folder, policy, started, reward_names(config.rewards))
    specs = dict(enumerate(config.rewards))
    rules = rule_scorers(
        config, folder, {source: spec for source, spec in specs.items() if is_rule(spec)}
    )
    scorers = [
        rules.get(source) or scorer_class(spec).build(spec, source, context)
        for source, spec in specs.items()
    ]
    pools = {rule.pool for rule in rules.values()}
    return Scoring(scorers, [*pools, *context.meters.values()], config.unscored)
