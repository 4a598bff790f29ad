# ruff: noqa: E501
"""Write the generated parts of the pages: options of every command, metrics, and the Python interface.

    python docs/reference.py            writes them
    python docs/reference.py --check    says which page is out of date, and ends with 1

The options come from the command, the functions from `ycore`'s docstrings. The names of the metrics are compared with those in
the code; their units and meanings are here.
"""

import ast
import inspect
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import ycore
from ycore.config.learners import GroupConfig
from ycore.config.schema import EvalConfig

DOCS = Path(__file__).resolve().parent
MARK = "<!-- written by docs/reference.py -->\n"
END = "<!-- end -->\n"

METRICS: dict[str, dict[str, tuple[str, str]]] = {
    "Rewards": {
        "ycore/reward": ("reward", "mean of the weighted sum of the rewards over all completions drawn in the step: how good the policy is"),
        "reward, reward_std": ("reward", "its mean and deviation over the completions trained on; dynamic sampling leaves out groups that are all right or all wrong"),
        "rewards/NAME/mean, rewards/NAME/std": ("reward", "one reward over the completions trained on"),
        "ycore/reward/NAME": ("reward", "the same of each dataset or environment, where there are several"),
        "frac_reward_zero_std": ("share", "groups of the step whose rewards are all equal: they teach nothing"),
        "ycore/kept": ("share", "completions that `--keep` keeps ([own-functions.md](own-functions.md))"),
        "ycore/masked": ("completions", "completions that no reward could score"),
        "ycore/reward_problems": ("counts", "why, by reward"),
        "ycore/reward_restarts": ("workers", "reward workers that hung or ended in the step, and were started again"),
        "ycore/sandbox_level": ("level", "what confines reward functions: 2 is `namespaces`, 1 `landlock`, 0 `none` ([sandbox.md](sandbox.md))"),
        "ycore/violations/NAME": ("share", "completions that broke this constraint ([algorithms.md](algorithms.md#constraints))"),
        "ycore/constraint_weight/NAME": ("reward", "what breaking it costs in the step, with `constraints.by=lagrangian`"),
        "ycore/code/programs, ycore/code/passed, ycore/code/no_code, ycore/code/compile_errors, ycore/code/run_errors, ycore/code/timeouts, ycore/code/memory, ycore/code/infra_errors, ycore/code/unreachable": ("programs", "programs of the completions, and how they ended ([rewards.md](rewards.md#code))"),
        "ycore/code/latency_s": ("s", "seconds of a program"),
        "ycore/judge/calls, ycore/judge/tokens, ycore/judge/latency_s": ("a step, s", "questions to the judge, tokens of its answers, seconds of a question"),
        "ycore/reward_model/calls, ycore/reward_model/tokens, ycore/reward_model/latency_s": ("a step, s", "the same of a reward model"),
        "ycore/judge/parse_failures": ("answers", "answers that held no verdict"),
        "ycore/judge/pairs, ycore/judge/position_bias": ("pairs, share", "pairs judged in both orders, and those decided by the position alone ([judges.md](judges.md))"),
    },
    "Completions": {
        "completions/mean_length, completions/min_length, completions/max_length": ("tokens", "lengths; `..._terminated_length` counts completions that ended by themselves"),
        "completions/clipped_ratio": ("share", "completions cut off at `--max-tokens`"),
        "num_tokens": ("tokens", "tokens trained on since the run began"),
        "ycore/turns/mean, ycore/turns/sequences": ("a completion", "turns, and sequences that are trained on ([agents.md](agents.md))"),
        "ycore/turns/masked_tokens": ("tokens", "tokens of a completion that the policy did not write"),
        "ycore/turns/tool_seconds, ycore/turns/reward": ("s, reward", "seconds of the tools in a completion; mean reward of single turns"),
        "ycore/turns/ended_NAME": ("completions", "completions that ended by `turns`, `length`, `deadline`, `forked` or `failed`"),
        "tools/call_frequency, tools/failure_frequency": ("a completion, share", "calls of tools, and those that failed"),
    },
    "Learning": {
        "loss": ("", "as TRL computes it; of policy gradients near 0, and no measure of success"),
        "grad_norm, learning_rate, epoch": ("", "before clipping; of the step; passes over the data"),
        "entropy": ("nats", "of the policy's next token"),
        "kl": ("nats", "distance to the reference, where `--beta` is above 0"),
        "clip_ratio/...": ("share", "tokens at the bound of the step (`region_mean`, `low_mean`, `high_mean`, ...)"),
        "ycore/outside_trust_region": ("share", "tokens that `--trust-region` masks"),
        "ycore/effective_share, ycore/effective_share/LAG": ("share", "effective sample size of the tokens' importance weights over their number, 1 is on policy; of those that a version so many steps older wrote"),
        "ycore/logprob_gap": ("nats", "mean difference of a token's log-probability between engine and trainer; constant and below 0.1 is healthy"),
        "sampling/importance_sampling_ratio/mean": ("ratio", "the importance weight between both; 1 without a cut of the sampling"),
        "ycore/skipped": ("0 or 1", "1 where no group of the step could teach: there is no gradient, and the model's passes are left out"),
        "ycore/critic/loss, ycore/critic/value, ycore/critic/grad_norm, ycore/critic/explained_variance, ycore/critic/explained_from/N": ("", "the critic of `ycore ppo`: its loss, mean value and gradient; the share of the returns that its values explain, and in completions from the token N on"),
        "ycore/pairs/accuracy, ycore/pairs/margin": ("share, nats", "of `ycore online-dpo`: pairs in the right order, and the mean margin"),
        "ycore/teacher/kl, ycore/teacher/divergence, ycore/teacher/calls, ycore/teacher/tokens, ycore/teacher/latency_s": ("nats, a step, s", "of `ycore distill`: the distance to the teacher, by tokens written or exact; questions to it, their tokens and seconds"),
        "rewards/accuracies, rewards/margins, rewards/chosen, rewards/rejected": ("share, nats", "of `dpo` and `kto`: pairs in the right order, margins and implicit rewards"),
        "accuracy, margin, mean_reward, min_reward, max_reward": ("share, reward", "of `ycore reward`: pairs in the right order, the difference, the values"),
        "mean_token_accuracy": ("share", "of `ycore sft`: tokens that the model would have chosen"),
        "logps/chosen, logps/rejected, logits/chosen, logits/rejected": ("nats", "of `dpo` and `kto`: what the policy gives both answers"),
        "ycore/flow/ratio, ycore/flow/ratio_off, ycore/flow/clipped, ycore/flow/velocity_gap, ycore/flow/pictures_per_s": ("ratio, share", "of `ycore flow`: the ratio of a step, how far it is from 1, how often it is clipped; distance to the reference's velocity; pictures drawn in a second"),
    },
    "Sampling": {
        "ycore/sampling/drawn, ycore/sampling/yield": ("groups, share", "groups drawn in the round; those that could teach, lately"),
        "ycore/sampling/surplus, ycore/sampling/filled, ycore/sampling/stale": ("groups", "groups kept for a later round; taken although they teach nothing; too old to be trained on"),
        "ycore/curriculum/dropped": ("prompts", "prompts that are drawn no more, because their last groups were solved"),
        "ycore/staleness, ycore/rounds_ahead, ycore/stale_gap": ("steps, rounds, nats", "how old the groups are, the rounds that were begun ahead of the step, and the gap of the old ones ([parallel.md](parallel.md#rounds-while-the-trainer-trains)); left-over groups count too"),
        "ycore/carried/groups, ycore/carried/completions, ycore/carried/tokens, ycore/carried/dropped": ("a step", "groups and completions that go on under newer weights ([parallel.md](parallel.md#completions-that-take-several-rounds))"),
        "ycore/replayed": ("0 or 1", "1 where the step's round came from the journal"),
    },
    "Time and machine": {
        "ycore/time/step, step_time": ("s", "the whole step; TRL's own clock of it"),
        "ycore/time/round, ycore/time/generate": ("s", "writing and scoring; until the last completion was written"),
        "ycore/time/train, ycore/time/sync, ycore/time/eval": ("s", "forward, backward and optimizer; the new weights into the engines; an evaluation"),
        "ycore/time/waited": ("s", "training waited for its round (`--max-staleness`)"),
        "ycore/tokens_per_s": ("tokens/s", "tokens of the completions over the seconds of the round"),
        "ycore/sync_mb": ("MB", "weights that a sync wrote"),
        "ycore/sync_proved": ("share", "tensors and bytes sent to an engine whose sums were read back from it, and were right"),
        "ycore/idle_share, ycore/bound_ratio": ("share, ratio", "of the engines' time in which they did nothing; the round over the time it would take without that"),
        "ycore/swaps, ycore/swap_s, ycore/engine_devices": ("a step, s, devices", "changes of role of the slots ([placement.md](placement.md)), and their seconds; the GPUs, or cores, that engines had alone"),
        "ycore/engine_restarts": ("engines", "engines that were started again since the step before"),
        "ycore/balance/before, ycore/balance/after, ycore/bytes_moved": ("ratio, bytes", "the most loaded rank over the mean, before and after groups are dealt out, and what ranks sent each other for that"),
    },
    "Evaluation": {
        "ycore/eval/reward, ycore/eval/rewards/NAME": ("reward", "on the held-out rows ([evaluation.md](evaluation.md))"),
        "ycore/eval/pass@K, ycore/eval/majority@K": ("share", "right with K tries, and by the vote of K"),
        "ycore/eval/.../low, ycore/eval/.../high": ("", "the bounds of the 95 % interval of a figure"),
        "ycore/eval/cut_off, ycore/eval/masked, ycore/eval/mean_length": ("share, tokens", "completions cut off, those without a reward, their length"),
        "ycore/eval/diversity, ycore/eval/diversity_of_right": ("", "how different the completions of a prompt are; of the right ones"),
        "ycore/eval/loss, ycore/eval/accuracy, ycore/eval/mean_token_accuracy, ycore/eval/rewards/accuracies": ("", "of the trainers without rollouts ([trainers.md](trainers.md#held-out-rows))"),
    },
}  # fmt: skip
"""By group, then by names: the unit, and the meaning."""
NO_METRICS = {
    "ycore/before_and_after",
    "ycore/report",
    "ycore/completions",
    "ycore/pictures",
    "ycore/NAME",
}
"""Names in the code that trackers use beside the metrics."""
SCORERS = re.compile(r"ycore/NAME/(calls|latency_s|tokens)")


def main() -> int:
    """Write the pages, or with `--check` compare them."""
    stale = [
        name
        for name, text in pages().items()
        if text != (DOCS / name).read_text(encoding="utf-8")
    ]
    if "--check" in sys.argv:
        for name in stale:
            print(f"docs/{name} is out of date; run `python docs/reference.py`")
        return bool(stale)
    for name in stale:
        (DOCS / name).write_text(pages()[name], encoding="utf-8")
    return 0


def pages() -> dict[str, str]:
    """Return the pages with generated parts as they should be."""
    options = (DOCS / "options.md").read_text(encoding="utf-8")
    before, _, rest = options.partition(MARK)
    return {
        "options.md": f"{before}{MARK}{options_table()}{END}{rest.partition(END)[2]}",
        "metrics.md": metrics_page(),
        "api.md": api_page(),
    }


def options_table() -> str:
    """Return a row for each option, with the commands that have it, its key, and what it means to each command."""
    commands = typer.main.get_command(typer_app()).commands  # type: ignore[attr-defined]
    rows: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    keys: dict[str, str] = {}
    for command, parsed in commands.items():
        for parameter in parsed.params:
            if parameter.opts[0].startswith("-"):
                names = ", ".join(
                    f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts]
                )
                text = re.sub(r"docs/([\w-]+)\.md", r"[\1.md](\1.md)", parameter.help or "")
                rows[names][text.replace("|", "\\|")].append(command)
                keys[names] = key_cell(parameter.name)
    lines = ["| option | commands | key: default | meaning |", "|---|---|---|---|"]
    for names, texts in rows.items():
        (first, _), *others = texts.items()
        meaning = " ".join([first, *(f"**{', '.join(of)}**: {text}" for text, of in others)])
        users = ", ".join(command for of in texts.values() for command in of)
        lines.append(f"| {names} | {users} | {keys[names]} | {meaning} |")
    lines.append("| `--help` | every command | | Show the options. |")
    return "\n".join(lines) + "\n"


def key_cell(option: str) -> str:
    """Return the key of a run with rollouts that an option sets, and its default; nothing where it sets none."""
    from ycore_cli.options import KEYS

    path = KEYS.get(option, option)
    for config in (GroupConfig, EvalConfig):
        field, model = None, config
        for part in path.split("."):
            field = model.model_fields.get(part) if inspect.isclass(model) else None
            model = field.annotation if field else None  # type: ignore[assignment]
        if field is None:
            continue
        if field.is_required():
            return f"`{path}`: required"
        default = field.get_default(call_default_factory=True, validated_data={})
        text = "{}" if path == "lora" else json.dumps(default).strip('"')
        return f"`{path}`: `{text}`"
    return ""


def typer_app() -> typer.Typer:
    """Return the command."""
    from ycore_cli.main import app

    return app


def metrics_page() -> str:
    """Return the page of the metrics; ValueError where the code and the table do not have the same names."""
    described = {
        name for group in METRICS.values() for names in group for name in names.split(", ")
    }
    missing = [
        name
        for name in names_in_code()
        if not any(matches(name, known) or matches(known, name) for known in described)
    ]
    if missing:
        raise ValueError(
            f"docs/reference.py says nothing about {', '.join(missing)}; add a line"
        )
    text = f"# Metrics\n\n{INTRODUCTION}\n"
    for group, entries in METRICS.items():
        text += f"\n## {group}\n\n| name | unit | meaning |\n|---|---|---|\n"
        for names, (unit, meaning) in entries.items():
            text += f"| {', '.join(f'`{name}`' for name in names.split(', '))} | {unit} | {meaning} |\n"
    return text


INTRODUCTION = """\
Every step is one JSON object in `metrics.jsonl`; trackers have the same names below `train/`, and evaluations below `eval/`. Names with
`ycore/` are ycore's own, the others TRL's. [reading-curves.md](reading-curves.md) says which to look at. A nat is a natural logarithm."""


def matches(pattern: str, name: str) -> bool:
    """Return whether a name is of a pattern, in which capitals and dots stand for anything."""
    anything = re.sub(r"\\.\\.\\.|\b[A-Z]+\b|(?<=_)[A-Z]+", r"[\\w./@-]+", re.escape(pattern))
    return re.fullmatch(anything, name) is not None


def names_in_code() -> Iterator[str]:
    """Yield every metric's name that the code writes or reads, with NAME for what it fills in."""
    names: set[str] = set()
    for path in sorted((DOCS.parent / "ycore").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "NAME"
                for part in parts
                if isinstance(part, ast.Constant | ast.FormattedValue)
            )
            if re.fullmatch(r"ycore/[\w/@.-]+[A-Za-z0-9]", text):
                names.add(text)
    yield from sorted(name for name in names - NO_METRICS if not SCORERS.fullmatch(name))


def api_page() -> str:
    """Return the page of what `import ycore` has, from its docstrings."""
    text = (
        "# Python\n\nThe commands are functions: `from ycore import grpo`. A mistake raises `ycore.errors.YcoreError` with the line "
        "that the\ncommand would print. Further keyword arguments are the keys of [options.md](options.md#keys) and fields of TRL's "
        'config:\n`steps=100`, `engine="transformers"`, `learning_rate=1e-5`.\n'
    )
    things = {name: getattr(ycore, name) for name in sorted(ycore.__all__)}
    functions = {name: thing for name, thing in things.items() if not inspect.isclass(thing)}
    text += "\n## Functions\n\n| function | what it does |\n|---|---|\n"
    meanings: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, function in functions.items():
        head, _, arguments = (inspect.getdoc(function) or "").partition("\nArgs:\n")
        text += f"| `{name}{plain_signature(function)}` | {' '.join(head.split())} |\n"
        arguments = arguments.partition("\nRaises:")[0]
        for item in re.split(r"^    (?=\w[\w, ]*: )", arguments, flags=re.MULTILINE)[1:]:
            argument, _, meaning = " ".join(item.split()).partition(": ")
            meanings[name, meaning] += argument.split(", ")
    text += "\n## Arguments\n\n| function | argument | meaning |\n|---|---|---|\n"
    for (name, meaning), arguments_of in meanings.items():
        names = ", ".join(f"`{argument}`" for argument in arguments_of)
        text += f"| `{name}` | {names} | {meaning} |\n"
    for name, thing in things.items():
        if name not in functions:
            text += described_class(name, thing)
    return re.sub(r"docs/([\w-]+)\.md", r"[\1.md](\1.md)", text)


def described_class(name: str, thing: type) -> str:
    """Return a class's docstring, and its attributes and methods as a list."""
    head, _, attributes = (inspect.getdoc(thing) or "").partition("\n\nAttributes:\n")
    text = f"\n## {name}\n\n{head}\n"
    lines = []
    for line in attributes.splitlines():
        attribute, _, meaning = line.strip().partition(": ")
        lines.append(f"- `.{attribute}`: {meaning}\n")
    for member, value in vars(thing).items():
        if member.startswith("_") or not (callable(value) or isinstance(value, property)):
            continue
        signature = "" if isinstance(value, property) else plain_signature(value)
        lines.append(f"- `.{member}{signature}`: {first_line(value)}\n")
    return text + ("\n" + "".join(lines) if lines else "")


def first_line(thing: Any) -> str:
    """Return the first sentence of a docstring."""
    return (inspect.getdoc(thing) or "").partition("\n\n")[0].replace("\n", " ")


def plain_signature(function: Any) -> str:
    """Return the parameters with their defaults, without types."""
    names = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self":
            continue
        mark = {parameter.VAR_KEYWORD: "**", parameter.VAR_POSITIONAL: "*"}.get(
            parameter.kind, ""
        )
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        names.append(f"{mark}{name}{default}")
    return f"({', '.join(names)})"


if __name__ == "__main__":
    sys.exit(main())
