"""Command lines that must be refused, with words of the refusal, and command lines that must be accepted."""

import json
from collections.abc import Sequence
from pathlib import Path

from tests.tiny_model import write_tiny_model

GRPO = "grpo --model {place}/model --dataset {place}/train.jsonl --reward exact_answer --output {place}/out --dry-run "


def command_words(more: str, place: Path) -> list[str]:
    """Split `GRPO` and what follows it."""
    return replaced(GRPO.format(place=place).split(), more.format(place=place).split())


def replaced(words: Sequence[str], more: Sequence[str]) -> list[str]:
    """Join two parts of a command line, the later of which replaces options of the earlier."""
    kept, later_options = list(words), [word.partition("=")[0] for word in more]
    for option in ("--model", "--dataset", "--output"):
        if option in kept and option in later_options:
            del kept[kept.index(option) : kept.index(option) + 2]
    return [*kept, *more]


def write_place(root: Path) -> Path:
    """A folder with models, datasets, a reward file and recipes, good and bad."""
    root.mkdir(parents=True, exist_ok=True)
    _write_models(root)
    rows = [{"prompt": f"{number} + 1 =", "answer": str(number + 1)} for number in range(8)]
    lines = [json.dumps(row) for row in rows]
    (root / "train.jsonl").write_text("\n".join(lines) + "\n")
    (root / "malformed.jsonl").write_text(
        "\n".join([*lines[:2], '{"prompt": ', *lines[2:]]) + "\n"
    )
    (root / "empty.jsonl").write_text("")
    (root / "null.jsonl").write_text(
        "\n".join([*lines[:3], json.dumps({"prompt": None, "answer": "1"})]) + "\n"
    )
    (root / "unanswered.jsonl").write_text(json.dumps({"prompt": "hello"}) + "\n")
    chat = {"prompt": [{"role": "user", "content": "1 + 1 ="}], "answer": "2"}
    (root / "chat.jsonl").write_text(json.dumps(chat) + "\n")
    (root / "rewards.py").write_text(
        "def one(prompts, completions, **columns):\n    return [1.0] * len(prompts)\n"
    )
    (root / "broken.yaml").write_text("steps: 3\nmodel: [m\n")
    (root / "typo.yaml").write_text("steps: 3\ngroup-size: 4\n")
    (root / "object.yaml").write_text("steps: !!python/object/apply:os.getpid []\n")
    (root / "good.yaml").write_text("steps: 3\ngroup_size: 4\n")
    (root / "used").mkdir()
    (root / "used" / "letter.txt").write_text("mine")
    return root


def _write_models(root: Path) -> None:
    write_tiny_model(root / "model", chat=True)
    write_tiny_model(root / "untemplated", chat=False)
    write_tiny_model(root / "remote", chat=True)
    (root / "remote" / "config.json").write_text(
        json.dumps({"model_type": "x", "auto_map": {"AutoModel": "m.M"}})
    )
    write_tiny_model(root / "mute", chat=True)
    for file in (root / "mute").glob("tokenizer*"):
        file.unlink()


BAD: tuple[tuple[str, str], ...] = (
    # sizes
    ("--group-size 1", "group_size must be 2 or more with advantage group"),
    ("--group-size two", "--group-size must be a whole number; it is 'two'"),
    ("--steps 0", "steps must be greater than 0; it is 0"),
    ("--max-tokens 512", "the model's context of 512 tokens; it is 512; e.g. --max-tokens 256"),
    (
        "--set engine.max_model_len=64 --max-tokens 64",
        "engine.max_model_len of 64 tokens; it is 64",
    ),
    ("--seed -1", "seed must be at least 0; it is -1"),
    (
        "--per-device-train-batch-size 7",
        "they are",
    ),
    (
        "--gradient-accumulation-steps 5",
        "leave one of the two out",
    ),
    (
        "--num-generations 4 --group-size 8",
        "num_generations is TRL's name of group_size, and they differ: 4 and 8",
    ),
    # options
    ("--lerning-rate 1e-4", "no option --lerning-rate; did you mean '--learning-rate'?"),
    ("--lerning_rate=1e-4", "no option --lerning_rate; did you mean '--learning-rate'?"),
    ("--grop-size 4", "no option --grop-size; did you mean '--group-size'?"),
    ("--lr 1e-4", "no option --lr; say --learning-rate 1e-4"),
    ("--seed 1 --seed 2", "--seed takes one value, and it is given 2 times; leave one out"),
    ("--lora --full", "--lora takes one value"),
    ("--weight-decay 0 --max-steps 3 --max-steps 4", "--max-steps is given twice"),
    ("--model --seed 1", "--model needs a value, and --seed follows it"),
    ("--preset --full", "--preset needs a value, and --full follows it"),
    ("-x", "no option -x"),
    ("stray", "'stray' is not an option; a value follows its option, e.g. --steps 100"),
    ("--steps", "option '--steps' requires an argument"),
    ("--learning-rate", "option '--learning-rate' requires an argument"),
    ("--learning-rate --beta 0", "--learning-rate needs a value, and --beta follows it"),
    ("--adam-beta1", "--adam-beta1 needs a value; TRL's default is 0.9"),
    (
        "--learning-rate fast",
        "learning_rate must be a number; it is 'fast'; TRL's default is 1e-06",
    ),
    ("--learning-rate nan", "learning_rate must be a finite number; it is 'nan'"),
    ("--learning-rate=-1", "learning_rate must be at least 0; it is '-1'"),
    ("--loss-type drgrpo", "it is 'drgrpo'; did you mean 'dr_grpo'?"),
    ("--report-to wandbb", "it is 'wandbb'; did you mean 'wandb'?"),
    ("--log-completions maybe", "log_completions must be true or false; it is 'maybe'"),
    ("--deepspeed {place}/zero9.json", "leave it out, and take --accelerate zero2"),
    (
        "--engine vlm",
        "engine.kind must be 'auto', 'vllm' or 'transformers'; it is 'vlm'; did you mean 'vllm'?",
    ),
    # what ycore keeps for itself
    ("--use-vllm", "use_vllm is not taken from TRL's fields: ycore starts"),
    ("--vllm-mode server", "vllm_mode is not taken from TRL's fields"),
    ("--generation-batch-size 64", "say `--prompts-per-step`"),
    ("--resume-from-checkpoint x", "say `--resume`"),
    # keys
    ("--set stesp=3", "no key stesp; did you mean 'steps'?"),
    ("--set engine.kidn=vllm", "no key engine.kidn; did you mean 'kind'?"),
    ("--set engine.count=many", "engine.count must be 'auto' or a whole number; it is 'many'"),
    ("--set engine", "--set takes key.path=value, not 'engine'"),
    ("--set engine.count=[1", "is not a YAML value"),
    ("--set rewards.3.weight=1", "there is no element '3'; the list has 1"),
    # what nothing reads
    ("--split test --dataset {place}/train.jsonl", "no option --split"),
    ("--set split=test", "--split test: {place}/train.jsonl is a file, and has no splits"),
    ("--eval-split test", "--eval-split needs rows to measure on"),
    ("--set eval_limit=3", "eval_limit needs rows to measure on"),
    (
        "--eval-dataset {place}/train.jsonl --eval-split test",
        "leave --eval-split out, or name another file",
    ),
    ("--max-turns 4", "max_turns is 4, and without --tools, --env or --agent nothing reads it"),
    ("--actions calls", "turns is {{'actions': 'calls'}}, and without --tools"),
    (
        "--log-every 3",
        "without --report-to nothing reads it; give --report-to, or leave it out",
    ),
    ("--set constraints.rate=2", "without --constraint nothing reads it"),
    # numbers
    ("--temperature inf", "temperature must be a finite number; it is 'inf'"),
    ("--oversample nan", "--oversample must be a finite number; it is nan; leave it out"),
    # recipes
    ("--recipe quikstart", "no recipe 'quikstart'; did you mean 'quickstart'"),
    (
        "--recipe {place}/brokn.yaml",
        "no such recipe file: {place}/brokn.yaml; did you mean 'broken.yaml'?",
    ),
    ("--recipe {place}/broken.yaml", "line 3: not YAML"),
    ("--recipe {place}/typo.yaml", "no key group-size; did you mean 'group_size'?"),
    # models
    ("--model {place}/modle", "no such model folder: {place}/modle"),
    ("--model {place}/mute", "has no tokenizer"),
    ("--model {place}/remote", "--trust-remote-code"),
    ("--model {place}/untemplated --dataset {place}/chat.jsonl", "has no chat template"),
    # datasets
    ("--dataset {place}/trian.jsonl", "trian.jsonl"),
    ("--dataset {place}/malformed.jsonl", "line 3"),
    ("--dataset {place}/empty.jsonl", "empty.jsonl"),
    ("--dataset {place}/null.jsonl", "row 3"),
    ("--dataset task:additon", "addition"),
    ("--prompt-column question", "question"),
    ("--answer-column solution", "solution"),
    # rewards
    ("--reward exact_anser", "exact_answer"),
    ("--reward {place}/rewrds.py:one", "rewrds.py"),
    ("--reward {place}/rewards.py:two", "two"),
    ("--dataset {place}/unanswered.jsonl", "answer"),
    # output
    ("--output {place}/used", "--output must be new or empty"),
    ("--output {place}/train.jsonl", "--output must be a folder"),
    ("--resume", "--resume needs the folder of a run"),
    ("--recipe {place}/object.yaml", "not YAML"),
)
"""Words after `GRPO`, and what the one line on standard error must contain."""

GOOD: tuple[str, ...] = (
    "",
    "--full",
    "--steps 1",
    "--group-size 2 --prompts-per-step 2",
    "--learning_rate=1e-5 --beta 0.01",
    "--max-tokens 500",
    "--reward length --reward exact_answer --set rewards.1.weight=0.5",
    "--reward {place}/rewards.py:one",
    "--dataset {place}/chat.jsonl",
    "--dataset task:addition?digits=2",
    "--recipe {place}/good.yaml",
    "--model {place}/untemplated",
    "--seed 4294967295",
    "--set engine.count=1 --set engine.max_model_len=256",
    "--loss-type dr_grpo --scale-rewards none",
    "--lora --set lora.r=4 --set lora.dropout=0.1",
    "--per-device-train-batch-size 4 --gradient-accumulation-steps 16",
    "--engine transformers --no-dynamic-sampling",
)
"""Words after `GRPO`, none of which may be refused."""
