"""Put plans and figures into the rows of the tables that a person reads."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from shutil import get_terminal_size

from ycore.run.text import as_duration, named_first, setting_in_words
from ycore.types import Record

Rows = list[tuple[str, str]]
_COMMAND = re.compile("`[^`]*`")


@dataclass(frozen=True, repr=False)
class Planned:
    """A plan: text when it is shown or printed, and in `values` what `--json` prints."""

    values: Record
    lines: Sequence[str]

    def __repr__(self) -> str:
        return "\n".join(self.lines)


def aligned(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a line a row, with columns as wide as their longest entries; every row has as many."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    for row in rows:
        yield "  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip()


def folded(rows: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Cut texts that are too wide for the terminal, or for 80 columns, at spaces; paths and `commands` stay whole."""
    columns = min(80, get_terminal_size().columns) - 12
    wrapper = textwrap.TextWrapper(
        columns,
        subsequent_indent="  ",
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for name, text in rows:
        glued = _COMMAND.sub(lambda match: match[0].replace(" ", "\0"), text)
        lines = wrapper.wrap(glued) if len(text) > columns else [text]
        yield from named_first(name, (line.replace("\0", " ") for line in lines))


def figure_rows(summary: Record) -> list[list[str]]:
    """Name and value of each plain figure of an evaluation's summary: `0.4167`, `60`, `1e-05`."""
    return [
        [name, f"{value:.4g}" if isinstance(value, float) else str(value)]
        for name, value in summary.items()
        if isinstance(value, float | int | str)
    ]


def plan_rows(plan: Record, *, resume: bool = False) -> Rows:
    """Put a `checked_plan` into words."""
    from ycore.api.shown_rows import reading_rows  # with pydantic

    config = plan["config"]
    model = plan["model"]
    context = f", context {model['context_length']}" if model["context_length"] else ""
    has_rollouts = "rewards" in config
    dataset = _named(config["dataset"] or "none", plan["dataset"]["reading"].get("split"))
    rows = [
        ("model", f"{config['model']}: {model['note']}{context}"),
        ("dataset", f"{dataset}: {_dataset_in_words(plan['dataset'])}"),
    ]
    rows += reading_rows(plan["dataset"]["reading"])
    if has_rollouts:
        rows += _reward_rows(plan)
    if evaluation := plan.get("evaluation"):
        figures = f"{evaluation['rows']} rows, by {', '.join(evaluation['rewards'])}"
        when = f"before the first step, every {evaluation['every']} steps and after the last"
        name = _named(evaluation["dataset"], evaluation["split"])
        rows.append(("held out", f"{name}: {figures}, {when}"))
    rows += [("warning", line) for line in plan["warnings"]]
    trains = config["algorithm"] != "eval"
    if trains:
        rows.append(("batch", plan["batch"]["in_words"]))
    if (ranks := plan["ranks"]).get("machines", 1) > 1:
        words = f"{ranks['machines']}, of which this is machine {ranks['machine']}; all meet at {ranks['meet']}"
        rows.append(("machines", words))
    rows.append(("run", f"{_run_in_words(plan)}, seed {config['seed']}"))
    if trains and plan["length"] is not None:
        rows += _length_rows(plan)
    changed = [
        f"{name} {setting_in_words(value)} (default {setting_in_words(default)})"
        for name, (value, default) in plan["changed"].items()
    ]
    if changed:
        rows.append(("changed", ", ".join(changed)))
    if has_rollouts:
        rows += _engine_rows(plan)
    goes_on = ", going on from its last checkpoint" if resume else ""
    files = [_files_in_words(plan)] if trains and plan["length"] is not None else []
    rows += _block("output", [config["output"] + goes_on, *files])
    return list(folded(rows))


def _length_rows(plan: Record) -> Rows:
    """Show the main settings, epochs, tokens and seconds of a run that trains."""
    length = plan["length"]
    steps = length["steps"]
    main = [
        f"{name.removeprefix('loss_type')} {setting_in_words(value)}".lstrip()
        for name, value in plan["main"].items()
        if value is not None
    ]
    rows = [("loss", ", ".join(main))] if main else []
    tokens = length["tokens_per_step"]
    if "rounds" in length:
        num_prompts = length["prompts"]
        data = f"{num_prompts:,} prompts"
        parts = plan["dataset"]["parts"]
        for name, share, num_rows in parts:
            share /= sum(weight for _, weight, _ in parts)
            data += f", {share:.0%} of {name} = {share * num_prompts / num_rows:.2g} epochs"
        if not parts and length["epochs"] is not None:
            data += f" = {_epochs(plan, round(length['epochs'], 1))}"
        data += f"; at most {tokens:,} tokens a step, {steps * tokens:,} in all"
    else:
        data = f"{_epochs(plan, length['epochs'])}; about {tokens:,} tokens a step, {steps * tokens:,} in all"
    return [*rows, ("data", data), *_block("time", _time_lines(length))]


def _epochs(plan: Record, number: float) -> str:
    """Put epochs into words; packed rows are read more often than their number says."""
    plural = "" if number == 1 else "s"
    return (
        f"{number:,g} epoch{plural}{' or more' if plan['config']['trl'].get('packing') else ''}"
    )


def _time_lines(length: Record) -> list[str]:
    if length["no_forecast"]:
        return [f"not forecast: {length['no_forecast']}"]
    time = length["time"]
    quickest, slowest = map(as_duration, time["run_s"])
    low, high = time["step_s"]
    return [
        f"{quickest} to {slowest} without evaluations, by speeds {time['speeds']}",
        f"start {time['start_s']:.0f} s, a step {low:.1f} to {high:.1f} s",
    ]


def _files_in_words(plan: Record) -> str:
    """Name the files that the run writes, and what leaves the machine."""
    config = plan["config"]
    trl = plan["trl"]
    model = "model/" if config["lora"] is None else "model/ (the adapter)"
    if config["merge"]:
        model = "model/ (the adapter; whole in model/merged/)"
    best = "best/, " if config.get("keep_best") else ""
    every = "step" if trl["save_steps"] == 1 else f"{trl['save_steps']} steps"
    files = f"{model}, {best}metrics.jsonl, curve.png, logs/, checkpoints/ (every {every}"
    files += f", the last {trl['save_total_limit']})" if trl["save_total_limit"] else ")"
    if config.get("keep_journal"):
        files += ", journal/ (every round)"
    trackers = trl["report_to"] if isinstance(trl["report_to"], list) else [trl["report_to"]]
    leaving = [name for name in trackers if name not in ("none", "tensorboard")]
    if trl.get("push_to_hub"):
        leaving.append(f"the hub ({trl.get('hub_model_id') or 'your own namespace'})")
    return files + (f"; sent to {', '.join(leaving)}" if leaving else "")


def _named(dataset: str, split: str | None) -> str:
    """Name a dataset, and the split that was read of one that has several."""
    return f"{dataset}, split {split}" if split else dataset


def _dataset_in_words(dataset: Record) -> str:
    columns = f"columns {', '.join(dataset['columns']) or 'none'}"
    if "held_out" not in dataset:
        rows = f"{dataset['rows']} row{'' if dataset['rows'] == 1 else 's'}"
        return f"{rows} of {'chat' if dataset['chat'] else 'text'} prompts, {columns}"
    apart = dataset["reading"].get("apart")
    apart = f" of {_named(**apart)}" if apart else ""
    rows = f"{dataset['rows']} rows to train on, {dataset['held_out']} held out{apart}"
    if dataset["eval_every"]:
        rows += f" (measured every {dataset['eval_every']} steps)"
    left_out = f"; {dataset['left_out']}" if dataset["left_out"] else ""
    return f"{rows}, {'chats' if dataset['chat'] else 'text'}, {columns}{left_out}"


def _reward_rows(plan: Record) -> Rows:
    config = plan["config"]
    rewards = ", ".join(
        f"{item['reward']} ({'constraint' if item['constraint'] else 'weight {:g}'.format(item['weight'])})"
        for item in config["rewards"]
    )
    rows = _block("rewards", [rewards, *plan["scorers"]])
    rows += _block("sandbox", plan["sandbox"])
    if config.get("preset") is not None:
        from ycore.config.presets import find_preset, preset_lines  # with pydantic

        rows += _block(
            "preset", preset_lines(find_preset(config["preset"]), trl=plan["trl"], run=config)
        )
    return rows


def _block(name: str, lines: list[str]) -> Rows:
    """Name the first line, and indent the rest below it."""
    below = [f"  {line}" for line in lines[1:]]
    return list(named_first(name, [*lines[:1], *below]))


def _engine_rows(plan: Record) -> Rows:
    config = plan["config"]
    rows = [
        ("engine", f"{plan['engine']}, completions of at most {config['max_tokens']} tokens")
    ]
    if plan["memory"]:
        rows.append(("memory", plan["memory"]))
    partners = [
        *config["tools"],
        *config["env"],
        *([config["agent"]] if config["agent"] else []),
    ]
    if partners:
        turns = f"at most {config['max_turns']}, with {', '.join(partners)}"
        if plan["calls_in_text"]:
            turns += ", called in the text"
            if config["turns"]["actions"] == "auto":
                turns += " (the chat template shows no tools)"
        rows.append(("turns", turns))
    return rows


def _run_in_words(plan: Record) -> str:
    config = plan["config"]
    batch = plan["batch"]
    if config["algorithm"] == "eval":
        if config["pairs"]:
            return "both answers of each row"
        return f"{config['num_samples']} completions of each prompt"
    length = f"{config['steps']} steps"
    if "epochs" in batch:
        length = f"{batch['steps']} steps, {_epochs(plan, batch['epochs'])},"
    weights = "every weight"
    if config["lora"] is not None:
        weights = f"LoRA r={config['lora']['r']}"
        if plan["model"]["sees"] and config["lora"]["target_modules"] == "all-linear":
            weights += " of the language model (the vision tower and its projector stay frozen)"
    dtype = "bfloat16" if config["dtype"] == "auto" else config["dtype"]
    return f"{length} of {weights}, {dtype}, learning rate {plan['trl']['learning_rate']:g}"
