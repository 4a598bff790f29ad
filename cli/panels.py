"""How a command is read: its help in panels, what holds for the words of every command line, and values on Tab."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from ycore.errors import ConfigError

PANELS = {
    "Data": (
        "model dataset recipe prompt_column answer_column benchmark split limit",
        "system_prompt trust_remote_code show_rows",
    ),
    "Reward": (
        "reward teacher tools env pairs",
        "max_turns constraint agent env_python actions sandbox",
    ),
    "Batch": (
        "steps epochs batch_size prompts_per_step group_size num_samples max_tokens max_length",
        "dynamic_sampling curriculum oversample max_staleness",
    ),
    "Algorithm": (
        "learning_rate method beta temperature num_iterations epsilon loss_type lora preset",
        "lr_scheduler_type warmup_steps weight_decay top_p top_k scale_rewards advantage keep loss divergence trust_region",
    ),
    "Engine": ("engine processes", "accelerate quantize placement deterministic hosts min_hosts"),
    "Evaluation": ("eval_dataset eval_every keep_best", "eval_split held_out eval_reward stop_when"),
    "Run": (
        "output dry_run resume report_to seed set_ json",
        "log_every resume_from accept_changes restarts keep_journal replay merge",
    ),
}  # fmt: skip
"""Parameters of the commands, by panel: the ones of `--help`, and the ones that only `--help-all` adds."""

_EMPTY = ("--system-prompt", "--prompt", "--dataset")  # options that may be empty


class PanelCommand(TyperCommand):
    """A command that lists its options in panels."""

    shows_all = False

    def make_context(self, *args: Any, **settings: Any) -> Any:
        if settings.get("resilient_parsing"):  # a Tab
            for parameter in self.params:
                parameter.__dict__["_custom_shell_complete"] = _offer_values
        return super().make_context(*args, **settings)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self.shows_all = "--help-all" in args
        if self.shows_all:
            args = ["--help"]
        if not ctx.resilient_parsing:
            self._refuse_misread_words(ctx, args)
        rest = super().parse_args(ctx, args)
        for name, value in ctx.params.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(
                    f"--{name.replace('_', '-')} must be a finite number; it is {value}; leave it out for its default"
                )
        return rest

    def _refuse_misread_words(self, ctx: Any, args: list[str]) -> None:
        """Refuse an option that comes twice but takes one value, and an option as the value of the one before it.

        A callback of an option sees its last value alone, so the words are parsed for their order first.
        """
        values, _, parameters = self.make_parser(ctx).parse_args(args=list(args))
        known = {
            option
            for parameter in self.get_params(ctx)
            for option in (*parameter.opts, *parameter.secondary_opts)
            if option.startswith("-")
        }
        for parameter, count in Counter(parameters).items():
            option = parameter.opts[0]
            value = values.get(parameter.name)
            takes_one = not getattr(parameter, "multiple", False) and value is not True
            if count > 1 and takes_one:
                raise ConfigError(
                    f"{option} takes one value, and it is given {count} times; leave one out"
                )
            if "" in (value if isinstance(value, list) else [value]) and option not in _EMPTY:
                raise ConfigError(f"{option} is empty; say {option} VALUE, or leave it out")
            if option.startswith("-") and isinstance(value, str) and value in known:
                raise ConfigError(
                    f"{option} needs a value, and {value} follows it; say {option} VALUE"
                )

    def format_options(self, ctx: Any, formatter: Any) -> None:
        parameters = {parameter.name: parameter for parameter in self.get_params(ctx)}
        if "output" not in parameters or "set_" not in parameters:
            return super().format_options(ctx, formatter)
        for panel, (usual, rare) in PANELS.items():
            names = f"{usual} {rare if self.shows_all else ''}".split()
            rows = [
                parameters[name].get_help_record(ctx) for name in names if name in parameters
            ]
            if rows:
                with formatter.section(panel):
                    formatter.write_dl(rows)
        if not self.shows_all:
            formatter.write(f"\n`ycore {self.name} --help-all` shows every option.\n")


def _offer_values(context: Any, parameter: Any, incomplete: str) -> list[str]:
    return [value for value in _values(parameter.name) if value.startswith(incomplete)]


def _values(name: str) -> Sequence[str]:
    """Return the values of a parameter; the run folders for a RUN."""
    from ycore.config.presets import presets
    from ycore.config.recipe_files import benchmarks, list_recipes
    from ycore.rewards.builtin import BUILTIN, CODE

    if name in ("run", "runs", "model", "replay", "teacher"):
        return [str(file.parent) for file in sorted(Path().glob("runs/*/run.json"))]
    if name in ("recipe", "file"):
        return [recipe.name for recipe in list_recipes()]
    if name in ("reward", "eval_reward", "constraint"):
        return [*BUILTIN, CODE]
    if name == "preset":
        return list(presets())
    if name == "benchmark":
        return list(benchmarks())
    return ()
