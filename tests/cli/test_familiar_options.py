"""Options of other trainers: some work, and for each other one the error has words that work."""

import re
import shlex
from importlib.resources import files

import pytest
import typer
import yaml
from ycore_cli.main import app
from ycore_cli.options import typed_keys

from ycore.config.resolve import resolve
from ycore.errors import ConfigError

FAMILIAR = yaml.safe_load(files("ycore.config").joinpath("familiar_options.yaml").read_text())
COMMANDS = {"rollouts": "grpo", "examples": "sft"}
TABLE = [
    (COMMANDS[kind], option, words)
    for kind in COMMANDS
    for option, words in {**FAMILIAR["any"], **FAMILIAR[kind]}.items()
] + [("eval", option, words) for option, words in FAMILIAR["eval"].items()]
VALUES = {
    "--dtype": "float32", "--torch-dtype": "bfloat16", "--gpu-memory-utilization": "0.5", "--optimizer": "adamw_torch",
    "--scheduler": "cosine", "--lr-scheduler": "cosine", "--adv-estimator": "rloo", "--logger": "wandb",
    "--reward-function": "length", "--lora-dropout": "0.1", "--lora-target-modules": "q_proj",
    "--dataset-train-split": "test", "--advantage-estimator": "rloo", "--reward-fn": "length", "--lora-target": "q_proj",
    "--rollout-name": "vllm", "--rollout-backend": "vllm", "--inference-backend": "vllm", "--reward-funcs": "length",
}  # fmt: skip
"""Values of options that take no number."""
WORKS = {
    "grpo": "--num-generations 4 --max-completion-length 64 --max-steps 3 --output-dir o --bf16 false --seed 1 "
    "--save-steps 2 --gradient-accumulation-steps 8 --max-grad-norm 1 --run-name mine --optim adamw_torch",
    "sft": "--num-train-epochs 2 --batch-size 8 --epochs 3 --max-length 64 --packing --weight-decay 0.1",
}


GROUP = typer.main.get_command(app)


def resolve_line(command: str, words: list[str]) -> object:
    """Resolve the config of a command line as the command does."""
    first = ["--model", "m", "--dataset", "d"]
    if command != "sft" and "--reward" not in words:
        first += ["--reward", "exact_answer"]
    for option in ("--model", "--dataset"):
        if option in words:
            del first[first.index(option) : first.index(option) + 2]
    context = GROUP.commands[command].make_context(command, [*first, *words])
    if command == "eval":  # it takes several, one run each
        (context.params["model"],) = context.params["model"]
    keys = typed_keys(context, algorithm=command) | {"algorithm": command}
    return resolve(sets=context.params["set_"] or (), options={"output": "o", **keys})


@pytest.mark.parametrize(("command", "option", "words"), TABLE)
def test_the_words_of_the_error_work(command: str, option: str, words: str) -> None:
    value = VALUES.get(option, "2")
    with pytest.raises(ConfigError) as caught:
        resolve_line(command, [option, value])
    said = str(caught.value)
    assert said == f"no option {option}; say {words.replace('{}', value)}"
    advice = re.sub(r" \(.*\)$", "", said.partition("; say ")[2]).replace(" N", " 2")
    resolve_line(command, shlex.split(advice.replace("=N", "=2")))


@pytest.mark.parametrize("option", ["--gpus", "--epochs", "--adv-estimator"])
def test_words_whose_option_the_command_lacks_are_not_said(option: str) -> None:
    with pytest.raises(ConfigError, match=f"^no option {option}$"):
        resolve_line("eval", [option, "2"])


def test_there_are_a_hundred_and_twenty_of_them() -> None:
    assert len({option for _, option, _ in TABLE}) >= 120


def test_a_value_is_quoted() -> None:
    with pytest.raises(ConfigError, match=r"say --model 'my models/a'$"):
        resolve_line("grpo", ["--model-name=my models/a"])


@pytest.mark.parametrize("command", WORKS)
def test_these_simply_work(command: str) -> None:
    words = WORKS[command].split()
    if "--num-train-epochs" in words:
        resolve_line(command, words[:2])
        words = words[2:]
    resolve_line(command, words)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("actor_rollout_ref.actor.optim.lr=1e-6", "--learning-rate 1e-6"),
        ("--actor-rollout-ref.actor.optim.lr=1e-6", "--learning-rate 1e-6"),
        ("actor_rollout_ref.model.path=models/a", "--model models/a"),
        ("actor_rollout_ref.rollout.n=4", "--group-size 4"),
        ("actor_rollout_ref.rollout.temperature=0.7", "--temperature 0.7"),
        ("actor_rollout_ref.actor.kl_loss_coef=0.01", "--beta 0.01"),
        ("algorithm.adv_estimator=rloo", "--advantage rloo"),
        ("data.max_response_length=64", "--max-tokens 64"),
        ("data.train_batch_size=16", "--prompts-per-step 16"),
        ("trainer.save_freq=20", "--save-steps 20"),
        ("-steps=5", "--steps 5"),
    ],
)
def test_what_verl_writes_with_dots_is_answered_by_its_last_words(
    typed: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_line("grpo", [typed])
    assert str(caught.value).endswith(f"; say {words}")
    resolve_line("grpo", words.split())


@pytest.mark.parametrize("typed", ["actor_rollout_ref.actor.use_kl_loss=true", "trainer.x=1"])
def test_what_is_unknown_with_dots_is_named(typed: str) -> None:
    with pytest.raises(ConfigError, match=f"no option --{typed.partition('=')[0]}"):
        resolve_line("grpo", [typed])


@pytest.mark.parametrize(
    ("option", "nearest"),
    [
        ("--lerning-rate", "--learning-rate"),
        ("--temprature", "--temperature"),
        ("--grop-size", "--group-size"),
        ("--gpuz", None),
        ("--cluster", None),
        ("--ray", None),
        ("--images", None),
    ],
)
def test_a_guess_is_near(option: str, nearest: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_line("grpo", [option, "1"])
    hint = f"; did you mean {nearest!r}?" if nearest else ""
    assert str(caught.value) == f"no option {option}{hint}"
