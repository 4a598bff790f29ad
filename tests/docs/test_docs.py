"""The pages are true: what they tell a reader to type works, and what they list is what there is."""

import ast
import atexit
import functools
import gzip
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import simulate
import typer
import yaml
import ycore_docs.digit_models as digit_models
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from ycore_cli.main import app

from tests.chaos.__main__ import make_parser as scorecard_parser
from tests.docs.warm_command import WarmCommand
from tests.flow.conftest import save_tiny_model
from tests.gpu.__main__ import make_parser as gpu_parser
from tests.models.test_gguf_file import write_random_model
from tests.tiny_vision import write_tiny_vision_model
from ycore.api import functions
from ycore.api.functions import Run
from ycore.api.run_settings import settings_config
from ycore.config.algorithms import ALGORITHMS
from ycore.config.learners import DistillConfig, GroupConfig, OnlineDPOConfig, PPOConfig
from ycore.config.recipe_files import list_recipes, load_benchmark, load_recipe
from ycore.config.schema import EvalConfig, RewardConfig, TuneConfig
from ycore.config.trl_arguments import aliases, refusal
from ycore.config.trl_fields import fields_of
from ycore.data.generated import TASKS
from ycore.errors import ConfigError
from ycore.rewards.builtin import BUILTIN, CODE, ENVIRONMENT
from ycore.rewards.code import TEST_COLUMNS, CodeSettings
from ycore.rewards.loading import SUPPLIED, inputs_of, load_reward
from ycore.run.files import write_json_atomic
from ycore.scoring.code_scorer import CodeMeter

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TO_WRITE = ("jsonl", "csv", "python", "yaml")
STARTS = (
    *("grpo", "ppo", "distill", "online-dpo", "sft", "reward", "dpo", "kto", "flow"),
    *("eval", "preflight", "pipeline", "resume"),
)
"""The commands that start something, unless it is a dry run."""
USES = ("chat", "serve", "export")
"""The commands for a trained model."""
OF_TRL = {"--config", "--model-name-or-path", "--dataset-name", "--reward-funcs", "--use-peft"}
"""Options of `trl grpo` that a page may set beside ours."""

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HUB_ID = re.compile(r"[A-Za-z][\w.-]*/[\w.-]+(:[\w-]+)?")


@dataclass(frozen=True)
class Block:
    """A fenced block; `before` is the text of the page up to it."""

    language: str
    text: str
    before: str

    @property
    def file(self) -> str | None:
        """Return the file that a reader is to write: named in the first comment, else at the end of the line before."""
        if self.language not in TO_WRITE:
            return None
        comment = re.match(r"# (\S+\.\w+)\n", self.text)
        named = re.findall(r"`([\w-]+\.\w+)`", self.before.rstrip().rpartition("\n")[2])
        return comment.group(1) if comment else named[-1] if named else None


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(match.group(1), match.group(2), text[: match.start()])
        for match in _BLOCK.finditer(text)
    ]


def files_of(page: Path) -> dict[str, str]:
    return {block.file: block.text for block in blocks(page) if block.file}


def commands() -> list[tuple[Path, str]]:
    """Return every command line of every page, with lines that go on joined; each only once a page."""
    lines_of_pages: dict[tuple[Path, str], None] = {}
    for page in PAGES:
        for block in blocks(page):
            if block.language == "sh":
                lines = re.sub(r"\\\n\s*", "", block.text).splitlines()
                lines_of_pages |= dict.fromkeys(
                    (page, line.strip()) for line in lines if line.strip() and line[0] != "#"
                )
    return list(lines_of_pages)


def of_program(name: str) -> list[Any]:
    chosen = [(page, line) for page, line in commands() if line.split()[0] == name]
    loads_model: set[str] = set()
    params = []
    for page, line in chosen:
        use = line.split()[1] if name == "ycore" else ""
        again = use in loads_model
        if use in ("chat", "export", "doctor"):
            loads_model.add(use)
        marks = [pytest.mark.verify] if again else []
        params.append(pytest.param(page, line, id=f"{page.stem}: {line}", marks=marks))
    return params


def table(page: str, heading: str) -> list[list[str]]:
    """Return the rows of the first table under a heading, without its head; a cell as it is written."""
    section = (ROOT / page).read_text(encoding="utf-8").partition(f"{heading}\n")[2]
    lines = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert lines is not None, f"{page} has no table under {heading!r}"
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines.group().splitlines()[2:]
    ]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


PARSERS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
COMMANDS = tuple(PARSERS)


# -- what the pages tell to type -----------------------------------------------------------------------------------


def test_there_is_something_to_test() -> None:
    assert {page.name for page in PAGES} >= {
        "README.md",
        "overview.md",
        "options.md",
        "rewards.md",
        "recipes.md",
    }
    assert len(of_program("ycore")) >= 15
    assert {"train.jsonl", "rewards.py", "test.jsonl"} <= files_of(ROOT / "README.md").keys()


def test_every_command_is_of_a_program_that_is_checked_here() -> None:
    assert {line.split()[0] for _, line in commands()} <= {
        "ycore",
        "make",
        "pip",
        "uv",
        "python",
    }


SIMULATOR = "python docs/benchmarks/simulate.py"


@pytest.mark.parametrize(
    ("page", "line"),
    [entry for entry in of_program("python") if entry.values[1].startswith(SIMULATOR)],
)
def test_lines_of_the_simulator_can_be_typed(page: Path, line: str) -> None:
    arguments = simulate.parse_arguments(shlex.split(line, comments=True)[2:])
    assert arguments.slots >= 1


def test_a_line_of_the_simulator_runs() -> None:
    words = shlex.split(f"{SIMULATOR} quickstart --slots 2 --judge-work 1")
    done = subprocess.run(
        [sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("page", "line"),
    [entry for entry in of_program("python") if not entry.values[1].startswith(SIMULATOR)],
)
def test_lines_of_the_scorecard_name_rows_that_are_there(page: Path, line: str) -> None:
    words = shlex.split(line, comments=True)
    if words[2] == "ycore_docs.digit_models":
        digit_models.make_parser().parse_args(words[3:])
        return
    known = (
        "tests.chaos",
        "tests.chaos.power",
        "tests.fuzz",
        "tests.gpu",
        "tests.sandbox",
    )
    assert words[:2] == ["python", "-m"] and words[2] in known
    done = subprocess.run(
        [sys.executable, *words[1:], "--dry-run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Nothing was started" in done.stdout


HARMLESS = "harmless-base-test.jsonl.gz"  # of hh-rlhf, which a reader fetches


@pytest.mark.parametrize(("page", "line"), of_program("ycore"))
def test_ycore_lines_work(page: Path, line: str, tmp_path: Path) -> None:
    if "textarena:" in line or "game-quickstart" in line:
        pytest.importorskip(
            "textarena", reason="the optional package textarena is not installed"
        )
    for name, text in files_of(page).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    if HARMLESS in line:
        texts = [f"\n\nHuman: What is {number}?\n\nAssistant: " for number in range(1000)]
        with gzip.open(tmp_path / HARMLESS, "wt") as file:
            file.writelines(
                json.dumps({"chosen": f"{text}a", "rejected": f"{text}b"}) + "\n"
                for text in texts
            )
    words = shlex.split(line, comments=True)
    if "--resume" in line or words[1] == "resume":
        write_unfinished_run(
            page, words[2] if words[1] == "resume" else option(line, "--output"), tmp_path
        )
    if "see-and-add" in words:
        seeing = tmp_path / "models" / "smollm2-digits"
        write_tiny_vision_model(seeing)
        digit_models.write_rows(seeing)
    if words[1] == "flow":
        save_tiny_model(tmp_path / "models" / "flow-digits")
    if words[1] == "distill" or "distill-quickstart" in words:
        write_stand_in(tmp_path / "runs" / "quickstart")
    if words[1] == "report":
        for run in [word for word in words[2:] if word.startswith("runs/")]:
            write_first_steps(tmp_path / run)
    if words[1] in USES:
        for run in {word for word in words[2:] if word.startswith("runs/")}:
            write_trained_run(tmp_path / run)
    if "--replay" in line:
        write_unfinished_run(page, option(line, "--replay"), tmp_path)
        (tmp_path / option(line, "--replay") / "journal").mkdir()
        (tmp_path / option(line, "--replay") / "journal" / "round-000000-rank-0.json").touch()
    done = dry_run(line, tmp_path)
    if needs_hub(line):
        assert done.returncode == 2
        assert re.match(
            r"error: no (model folder|dataset file) .*: HF_HUB_OFFLINE is set; .*\n\Z",
            done.stderr,
        )
    else:
        assert done.returncode == 0, done.stderr
        assert "Nothing was started" in done.stdout or not starts_something(words[1:])


def starts_something(words: list[str]) -> bool:
    """`ycore recipes` lists; `ycore recipes NAME` runs a recipe."""
    runs_a_recipe = words[0] == "recipes" and len(words) > 1 and not words[1].startswith("-")
    return words[0] in STARTS or runs_a_recipe


def dry_run(line: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Dry-run the command in `folder`, without a hub and with empty caches; what would train or measure only plans."""
    words = shlex.split(line, comments=True)[1:]
    if (starts_something(words) or words[0] == "serve") and "--dry-run" not in words:
        words.append("--dry-run")
    models = [word for before, word in itertools.pairwise(words) if before == "--model"]
    for model in models:
        if model.startswith("runs/"):
            write_stand_in(folder / model)
    for model in re.findall(r"rm:(runs/[\w/-]+)", line):
        write_stand_in(folder / model)
    caches = {"HF_HOME": str(folder / "hub"), "YCORE_CACHE": str(folder / "cache")}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **caches}
    with tempfile.TemporaryDirectory() as scratch:
        return warm_command().run(words, cwd=folder, env=environment, scratch=Path(scratch))


@functools.cache
def warm_command() -> WarmCommand:
    command = WarmCommand()
    atexit.register(command.close)
    return command


def option(line: str, name: str) -> str:
    words = shlex.split(line, comments=True)
    return words[words.index(name) + 1] if name in words else ""


def write_unfinished_run(page: Path, output: str, folder: Path) -> None:
    """Write what an earlier command of the page would have left in `output` when it was stopped."""
    mine = [
        line for of, line in commands() if of == page and option(line, "--output") == output
    ]
    began = next(line for line in mine if "--resume" not in line and "--dry-run" not in line)
    plan = dry_run(f"{began} --json", folder)
    assert plan.returncode == 0, plan.stderr
    (folder / output).mkdir(parents=True)
    (folder / output / "run.json").write_text(
        json.dumps({"config": json.loads(plan.stdout)["config"]})
    )


def write_first_steps(folder: Path) -> None:
    """Write as much of a run as somebody who looks at it needs."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(
        json.dumps({"config": {"steps": 1, "model": "tiny", "prompts_per_step": 1}})
    )
    (folder / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": step, "reward": 0.5, "step_time": 1.0}) + "\n"
            for step in range(1, 13)
        )
    )


def write_trained_run(folder: Path) -> None:
    write_random_model(folder / "model", "llama")
    (folder / "model" / "chat_template.jinja").write_text(
        "{% for turn in messages %}{{ turn.content }}\n{% endfor %}"
    )
    config = {
        "algorithm": "grpo",
        "model": "tiny",
        "dataset": "d.jsonl",
        "rewards": [{"reward": "exact_answer"}],
    }
    (folder / "run.json").write_text(json.dumps({"config": config}))


def write_stand_in(folder: Path) -> None:
    """Write what an earlier run of the page would have left: as much of an adapter as a dry run looks at."""
    import numpy
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "smollm2-135m"})
    )
    save_file({"weight": numpy.zeros(1)}, folder / "adapter_model.safetensors")


def needs_hub(line: str) -> bool:
    """Whether a model or dataset of the command, or of its shipped recipe, is a hub's; a plan knows some by heart."""
    if line.split()[1] == "plan":
        return False
    recipe = option(line, "--recipe")
    base = load_recipe(recipe) if recipe in {entry.name for entry in list_recipes()} else {}
    base |= load_benchmark(name)["run"] if (name := option(line, "--benchmark")) else {}
    values = [option(line, f"--{key}") or base.get(key, "") for key in ("model", "dataset")]
    return any(
        _HUB_ID.fullmatch(value) and not value.startswith(("runs/", "models/"))
        for value in values
    )


@pytest.mark.parametrize(("page", "line"), of_program("make"))
def test_make_lines_are_targets(page: Path, line: str) -> None:
    for target in line.split()[1:]:
        assert makefile_lines(target), f"the Makefile has no target {target}"


def test_make_demo_is_a_run_that_works(tmp_path: Path) -> None:
    runs = [
        line.replace("$(BIN)/", "") for line in makefile_lines("demo") if "$(BIN)/ycore" in line
    ]
    assert runs
    for line in runs:
        done = dry_run(line, tmp_path)
        assert done.returncode == 0, done.stderr


def test_make_prints_sentences_and_no_commands_to_a_newcomer() -> None:
    installs = makefile_lines("$(READY)")[1:]
    demo = makefile_lines("demo")[1:]
    assert installs
    assert demo
    assert all(line.startswith("@") for line in [*installs, *demo])
    script = (ROOT / "install.sh").read_text().splitlines()
    slow = [
        number
        for number, line in enumerate(script)
        if "pip install" in line and "${EDITABLE" in line
    ]
    assert slow
    for number in slow:
        assert any("say " in line for line in script[number - 5 : number]), script[number]


def makefile_lines(target: str) -> list[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    rule = re.search(rf"^{re.escape(target)}:.*\n((?:\t.*\n?)*)", text, re.MULTILINE)
    return [line.strip() for line in rule.group(0).splitlines()] if rule else []


@pytest.mark.parametrize(("page", "line"), [*of_program("pip"), *of_program("uv")])
def test_pip_lines_name_extras_that_exist(page: Path, line: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    words = shlex.split(line, comments=True)
    words = words[words.index("install") + 1 :]
    for target in words[2:] if words[0] == "--torch-backend" else words:
        if target == "uv":
            continue
        name, _, extras = target.rstrip("]").partition("[")
        assert name in (".", project["name"])
        assert set(extras.split(",")) <= project["optional-dependencies"].keys()


# -- what the pages tell to write ----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_are_what_they_say(page: Path) -> None:
    for block in blocks(page):
        assert block.language in ("", "sh", "bash", *TO_WRITE)
        assert block.file or block.language not in TO_WRITE, (
            f"which file is this?\n{block.text}"
        )
        if block.language == "jsonl":
            assert all(isinstance(json.loads(line), dict) for line in block.text.splitlines())
        elif block.language == "python":
            ast.parse(block.text)
        elif block.language == "yaml":
            assert isinstance(yaml.safe_load(block.text), dict)


@pytest.mark.parametrize(
    ("page", "reward", "texts", "answers", "expected"),
    [
        (
            "README.md",
            "rewards.py:short_and_right",
            ["blue", "The colour of it is surely blue", "red"],
            ["blue"] * 3,
            [1.0, 0.96, 0.0],
        ),
        ("docs/rewards.md", "polite.py:polite", ["Thank you", "No"], ["7"] * 2, [1.0, 0.0]),
        (
            "docs/rewards.md",
            "polite.py:near",
            ["It is 7.", "12", "seven", "7"],
            ["7"] * 3 + [None],
            [1, 0, 0, None],
        ),
    ],
)
def test_reward_functions_of_the_pages_score(
    page: str,
    reward: str,
    texts: list[str],
    answers: list[str],
    expected: list[float | None],
    tmp_path: Path,
) -> None:
    file, _, name = reward.partition(":")
    (tmp_path / file).write_text(files_of(ROOT / page)[file], encoding="utf-8")
    function = load_reward(RewardConfig(reward=f"{tmp_path / file}:{name}"))
    offered: dict[str, Any] = {"prompts": [[]] * len(texts), "answer": answers}
    offered["completions"] = [[{"role": "assistant", "content": text}] for text in texts]
    accepted = {
        key: value for key, value in offered.items() if inputs_of(function).accepts(key)
    }
    assert function(**accepted) == pytest.approx(expected)


# -- what the pages point to ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_resolve(page: Path) -> None:
    links = [
        link
        for link in _LINK.findall(page.read_text(encoding="utf-8"))
        if not link.startswith("https://")
    ]
    missing = [link for link in links if not resolves(page, link)]
    assert missing == []


def resolves(page: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    if not anchor or not target.is_file():
        return target.exists()
    headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
    return anchor in [
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")
        for heading in headings
    ]


# -- what the pages list -------------------------------------------------------------------------------------------


@functools.cache
def declared(command: str) -> frozenset[str]:
    """Return the options of a command, as it declares them."""
    return frozenset({"--help"}) | {
        name
        for parameter in PARSERS[command].params
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("-")
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_documented_and_no_other(command: str) -> None:
    rows = table("docs/options.md", "## Options")
    assert {
        option
        for names, where, *_ in rows
        if command in where.split(", ") or where == "every command"
        for option in quoted(names)
    } == declared(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_options_that_a_page_mentions_exist(page: Path) -> None:
    scripts = (scorecard_parser(), gpu_parser(), simulate.make_parser())
    of_scripts = {
        option
        for parser in scripts
        for option in re.findall(r"--[a-z-]+", parser.format_help())
    }
    known = (
        {
            "--version",
            "--help-all",
            "--install-completion",
            "--torch-backend",
            "--shm-size",
            "--signal",
            "--requeue",
        }
        | OF_TRL
        | of_scripts
        | {option for name in COMMANDS for option in declared(name)}
    )
    known |= {
        field.option
        for row in ALGORITHMS.values()
        for field in fields_of(row.trl_config).values()
    }
    known |= {option.replace("--", "--no-", 1) for option in known}
    prose = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    mentioned = {
        word.replace("_", "-")
        for text in quoted(prose)
        for word in re.findall(r"(?<!\S)--[a-z][\w-]+", text)
    }
    assert mentioned <= known


def config_keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Return every key by its path, with its default; `PydanticUndefined` where it must be given."""
    for name, field in model.model_fields.items():
        inner = next(
            (
                part
                for part in (field.annotation, *get_args(field.annotation))
                if is_model(part)
            ),
            None,
        )
        if name in (
            "eval_rewards",
            "mixture",
            "few_shot",
        ):  # the keys of one are those of `rewards`, or of the run, or a turn's
            inner = None
        if name in ("rewards", "lora") or inner is None:
            yield prefix + name, {} if inner and not field.is_required() else field.default
        if inner is not None:
            yield from config_keys(inner, f"{prefix}{name}.{'0.' if name == 'rewards' else ''}")


def is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def documented_keys(page: str) -> dict[str, Any]:
    """Return every key of a page's table with the default that is written there; a row may have several of both."""
    documented: dict[str, Any] = {}
    if page.endswith("options.md"):
        for _, _, key, _ in table(page, "## Options"):
            if key:
                name, _, default = key.partition(": ")
                documented[quoted(name)[0]] = read_default(default)
    for names, defaults, _ in table(page, "## Keys"):
        keys = quoted(names)
        cells = defaults.split(", ") if len(keys) > 1 else [defaults]
        for key, cell in zip(keys, cells, strict=True):
            assert key not in documented, f"{key} is documented twice"
            documented[key] = read_default(cell)
    return documented


def read_default(cell: str) -> Any:
    return yaml.safe_load(quoted(cell)[0]) if "`" in cell else cell


def test_every_key_is_documented_with_its_default_and_no_other() -> None:
    documented = documented_keys("docs/options.md")
    keys: dict[str, Any] = {}
    for config_class in (PPOConfig, DistillConfig, OnlineDPOConfig, EvalConfig, GroupConfig):
        keys |= dict(config_keys(config_class))
    assert {"lora.r", "engine.count", "rewards.0.weight", "trl"} <= keys.keys()
    assert documented.keys() == keys.keys()
    for key, default in keys.items():
        expected = "required" if default is PydanticUndefined else default
        assert documented[key] == expected, key


def test_the_trainers_page_has_their_keys_and_aliases() -> None:
    trainer_keys, shared = (
        documented_keys("docs/trainers.md"),
        documented_keys("docs/options.md"),
    )
    section = (
        (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8").partition("## Keys\n")[2]
    )
    same = quoted(section.partition("same name, default and meaning")[2].partition("\n\n")[0])
    documented = trainer_keys | {key: shared[key] for key in same}
    fields = TuneConfig.model_fields
    assert documented.keys() == fields.keys() and not trainer_keys.keys() & set(same)
    for key, field in fields.items():
        default = {} if key == "lora" else field.default
        expected = "required" if default is PydanticUndefined else default
        assert documented[key] == expected, key
    page = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
    spelled, aliased = (
        re.findall(r"`max_steps`.*? are TRL's names of (.*)\.\n", page, re.DOTALL),
        aliases(ALGORITHMS["sft"]).values(),
    )
    assert spelled and quoted(spelled[0]) == list(aliased)


def test_trl_names_that_ycore_owns_are_documented() -> None:
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    section = page.partition("### TRL's names of ycore's keys\n")[2].partition("\n#")[0]
    assert dict(re.findall(r"`(\w+)` is\s+`(\w+)`", section)) == aliases(ALGORITHMS["grpo"])
    rows = table("docs/options.md", "### Refused fields")
    documented = {
        name for names, _ in rows for name in quoted(names) if not name.endswith("...")
    }
    refused = {name for name in fields_of("GRPOConfig") if refusal(name, ALGORITHMS["grpo"])}
    assert documented == {name for name in refused if not name.startswith("vllm_")}


def test_learning_rates_are_documented_as_they_are() -> None:
    documented = {}
    for commands_of, every, adapters, _ in table("docs/algorithms.md", "## Learning rates"):
        documented |= dict.fromkeys(quoted(commands_of), (float(every), float(adapters)))
    assert documented == {
        name: (row.learning_rate, row.lora_learning_rate) for name, row in ALGORITHMS.items()
    }


def test_the_python_lines_of_the_page_for_agents_are_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "skill.md").read_text(encoding="utf-8")
    lines = page.partition("## From Python")[2].partition("```\n")[2].partition("```")[0]
    configs = []

    def plan(algorithm: str, settings: dict[str, Any], *, resume: bool) -> Run:
        configs.append(settings_config(algorithm, dict(settings), resume=resume))
        return Run(written(Path("run")))

    def written(folder: Path) -> Path:
        folder.mkdir(parents=True)
        write_json_atomic(folder / "run.json", {})
        return folder

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(functions, "_train", plan)
    monkeypatch.setattr(
        functions,
        "evaluation_plan",
        lambda config, **_: configs.append(config) or {"warnings": []},
    )
    monkeypatch.setattr(
        functions,
        "run_evaluations",
        lambda evaluations: [written(Path(evaluation.output)) for evaluation in evaluations],
    )
    exec(compile(lines, "skill.md", "exec"), {})
    assert [config.algorithm for config in configs] == ["grpo", "eval"] and len(
        lines.splitlines()
    ) == 3


def test_benchmarks_are_documented_as_they_are() -> None:
    rows = table("docs/evaluation.md", "## Benchmarks by name")
    for name, data, reward, _, tokens, source in rows:
        known = load_benchmark(quoted(name)[0])
        run = known["run"]
        assert (
            quoted(data) == [run["dataset"]]
            and run.get("split", "") in data
            and source in known["source"]
        )
        assert int(tokens) == run["max_tokens"] if "max_tokens" in run else run["pairs"]
        assert [name for name in quoted(reward) if name in BUILTIN or name == CODE] == [
            reward_config["reward"] for reward_config in run.get("rewards", [])[:1]
        ]
    with pytest.raises(ConfigError, match=", ".join(quoted(row[0])[0] for row in rows)):
        load_benchmark("none")


def test_built_in_rewards_are_documented_with_their_arguments() -> None:
    documented = {
        quoted(name)[0]: arguments
        for name, arguments, _ in table("docs/rewards.md", "## Built-in rewards")
    }
    assert documented.keys() == BUILTIN.keys() | {CODE, ENVIRONMENT}
    for name, function in BUILTIN.items():
        argument_names = [argument.partition("=")[0] for argument in quoted(documented[name])]
        wanted = sorted(function.__kwdefaults__ or {}) or ["max_tokens", "cache_tokens"] * (
            name == "overlong"
        )
        assert sorted(argument for argument in argument_names if "<" not in argument) == sorted(
            wanted
        )
        for argument, _, default in (
            item.partition("=") for item in quoted(documented[name]) if "=" in item
        ):
            assert yaml.safe_load(default) == (function.__kwdefaults__ or {})[argument]


def test_the_code_rewards_settings_and_metrics_are_documented() -> None:
    section = (
        (ROOT / "docs" / "rewards.md")
        .read_text(encoding="utf-8")
        .partition("\n## Code\n")[2]
        .partition("\n## ")[0]
    )
    documented = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", section, re.MULTILINE))
    defaults = {name: field.default for name, field in CodeSettings.model_fields.items()}
    assert {name: yaml.safe_load(text) for name, text in documented.items()} == {
        **defaults,
        "packages": [],
    }
    metrics = set(re.findall(r"`(ycore/code/\w+)`", section))
    assert metrics == set(CodeMeter().metrics(CodeMeter().take()))
    assert all(f"`{name}`" in section for name in TEST_COLUMNS)


def test_what_a_reward_is_called_with_is_documented() -> None:
    rows = table("docs/rewards.md", "### Arguments of a call")
    assert {name for names, _ in rows for name in quoted(names)} == set(SUPPLIED)


def test_shipped_recipes_and_tasks_are_documented() -> None:
    rows = table("docs/recipes.md", "## Shipped recipes")
    assert {name for cell, *_ in rows for name in quoted(cell)} == {
        entry.name for entry in list_recipes()
    }
    rows = table("docs/options.md", "### Generated tasks")
    tasks = {quoted(name)[0]: quoted(arguments) for name, arguments, _ in rows}
    assert tasks == {f"task:{name}": ["digits=1"] for name in TASKS}
