"""`ycore flow`: train a model that draws, by flow matching, on rewards of its pictures."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from ycore_cli import options as o
from ycore_cli.output import before_and_after
from ycore_cli.train import train_as_typed

from ycore.run.files import RunFolder, read_json

if TYPE_CHECKING:
    from ycore.flow.flow_settings import FlowConfig
    from ycore.run.claim import Resume


@o.takes(
    """
    split limit prompts_per_step group_size eval_every num_samples dynamic_sampling sandbox
    keep_journal restarts seed set_ recipe output dry_run resume resume_from accept_changes
    json
    """,
    model=o.text("Folder of a flow model as diffusers saves it."),
    dataset=o.text(
        "Rows that each ask for a class; or `classes`, each once; e.g. prompts.jsonl."
    ),
    reward=o.texts(
        "A function of images, file.py:function, or a judge that sees, judge:FILE.yaml; may be repeated; e.g. "
        "rewards.py:score.",
        metavar="NAME",
    ),
    eval_reward=o.texts(
        "The same, measured beside the reward and not trained on; may be repeated; e.g. judge.py:reads.",
        metavar="NAME",
    ),
    method=o.text(
        "How it learns: nft (DiffusionNFT) or grpo (Flow-GRPO); see docs/pictures.md.",
        metavar="NAME",
    ),
    learning_rate=o.fraction("Learning rate [1e-05]."),
    steps=o.whole_number("Optimizer steps [20]."),
)
def flow(context: typer.Context, **_: Any) -> None:
    """Train a model that draws on a reward of its pictures.

    A round draws a group of pictures of each condition, reward functions look at them as PIL images, and
    DiffusionNFT or Flow-GRPO makes the better ones likelier. Rows have the class in the column label.
    See docs/pictures.md.

    \b
    ycore flow --recipe digits
    ycore flow --model my-model --dataset prompts.jsonl \\
               --reward rewards.py:score --eval-reward judge.py:reads
    """
    train_as_typed(context, "flow")


def flow_plan(config: "FlowConfig", *, resume: "Resume | None") -> dict[str, Any]:
    """Plan the run as JSON values; UserError where it cannot work. Nothing is loaded or made."""
    from ycore.flow.flow_inputs import flow_model, load_conditions
    from ycore.flow.flow_settings import IMAGES
    from ycore.judge.declaration import JUDGE_PREFIX, check_picture_judges
    from ycore.rewards.worker_client import check_reward
    from ycore.run.claim import check_claim, contents_of
    from ycore.run.resuming import check_began_with
    from ycore.run.secrets import redact
    from ycore.sandbox.level import choose_level

    model = flow_model(config.model)
    prompts = load_conditions(config, num_classes=model.num_classes)
    columns = [*prompts.columns, IMAGES]
    check_picture_judges(config, prompts.columns)
    for reward in (*config.rewards, *config.eval_rewards):
        if reward.kind != JUDGE_PREFIX:
            check_reward(
                reward,
                columns,
                settings=config.reward_workers,
                sandbox=config.sandbox,
                run_folder=Path(config.output),
            )
    home = RunFolder(Path(config.output))
    check_claim(home, config, resume=resume)
    if resume is not None and not resume.accept_changes:
        contents = contents_of(prompts.identity, model.root / model.part, config.code_files)
        check_began_with(home, contents)
    return {
        "config": redact(config.model_dump(mode="json")),
        "ranks": {"world": 1},
        "trl": {"max_steps": config.steps},
        "model": {"folder": str(model.root), "network": model.network},
        "dataset": {"rows": len(prompts.prompts), "columns": list(prompts.columns)},
        "sandbox": choose_level(config.sandbox.level).line,
        "output": str(Path(config.output).absolute()),
    }


def flow_plan_rows(
    config: "FlowConfig", plan: Mapping[str, Any], *, resume: bool
) -> list[tuple[str, str]]:
    """The plan as a person reads it, a name and a text each."""
    flow = config.flow
    noise = ""
    if flow.rule == "sde":
        noise = f" with noise {flow.noise:g} in {flow.window or flow.steps - 1} of them"
    distance = f", {flow.kl:g} times the distance to the first model" if flow.kl else ""
    rewards = [f"{spec.reward} (weight {spec.weight:g})" for spec in config.rewards]
    judges = [spec.reward for spec in config.eval_rewards]
    judges = judges or ["the rewards alone (--eval-reward names a judge)"]
    pictures = f"{config.prompts_per_step} conditions x {config.group_size} pictures a step"
    rate = f"learning rate {config.learning_rate:g}"
    judges.append(f"{config.num_samples} pictures of each class, every {config.every} steps")
    return [
        ("model", f"{config.model}: {plan['model']['network']}"),
        (
            "dataset",
            f"{config.dataset}: {plan['dataset']['rows']} rows, the class in {config.condition_column}",
        ),
        ("rewards", ", ".join(rewards)),
        ("sandbox", plan["sandbox"]),
        ("method", f"{flow.method}{distance}"),
        ("sampler", f"{flow.rule}, {flow.steps} steps{noise}, in the trainer's process"),
        ("batch", f"{pictures}, {flow.updates} updates"),
        ("run", f"{config.steps} steps of every weight, float32, {rate}, seed {config.seed}"),
        ("held out", ", ".join(judges)),
        ("output", config.output + (", going on from its last checkpoint" if resume else "")),
    ]


def flow_closing_rows(config: "FlowConfig") -> list[tuple[str, str]]:
    """The measurements, the places of the results, and the command of the report."""
    folder = RunFolder(Path(config.output))
    summary = read_json(folder.held_out) if folder.held_out.is_file() else {}
    rows = []
    if ends := summary.get("held_out"):
        before = ends["before"]
        after = ends["after"]
        titles = {
            "reward": "judge" if config.eval_rewards else "reward",
            "trained_reward": "reward",
        }
        for name, title in titles.items():
            if name in after and name in before:
                rows.append((title, before_and_after(ends, name)))
        key = "diversity"
        note = ""
        if before["diversity_of_right"] and after["diversity_of_right"]:
            key = "diversity_of_right"
            note = ", of the pictures that are right"
        rows.append(("diversity", f"{before[key]:.2f} -> {after[key]:.2f}{note}"))
    return [
        *rows,
        ("pictures", str(folder.pictures)),
        ("model", str(folder.model)),
        ("curve", str(folder.curve)),
        ("report", f"ycore report {shlex.quote(str(folder.root))}"),
    ]
