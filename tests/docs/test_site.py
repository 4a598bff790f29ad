"""The site is built without a network, its search included; the pages stand in one order; words find them."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from ycore_cli.main import run
from ycore_cli.pages import explanation, read_order, read_pages, search, sections

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 4500
ORDER = read_order((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
PAGES = read_pages()


# -- the site ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`make docs` in a copy, with proxies that nobody answers."""
    pytest.importorskip("zensical", reason="the optional package zensical is not installed")
    folder = tmp_path_factory.mktemp("site")
    for name in ("Makefile", "install.sh", "pyproject.toml", "zensical.toml"):
        shutil.copy2(ROOT / name, folder)
    (folder / "ready").touch()  # nothing is to be installed
    shutil.copytree(
        ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("__pycache__")
    )
    nobody = "http://127.0.0.1:9"
    done = subprocess.run(
        [
            "make",
            "--no-print-directory",
            "docs",
            f"BIN={Path(sys.executable).parent}",
            "READY=ready",
        ],
        cwd=folder,
        env={**os.environ, "HTTP_PROXY": nobody, "HTTPS_PROXY": nobody, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("Building the site"), "seconds are silent"
    return folder / "build" / "site"


def test_every_page_is_in_the_site(site: Path) -> None:
    assert {page.stem for page in site.glob("*.html")} >= PAGES.keys()


def test_the_site_can_be_searched(site: Path) -> None:
    index = json.loads((site / "search.json").read_text(encoding="utf-8"))
    locations = [item["location"] for item in index["items"] if "staleness" in item["text"]]
    assert any("parallel.html" in place for place in locations)


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.glob("*.html"):
        text = page.read_text(encoding="utf-8")
        tags = re.findall(r"<(?:script|img|iframe)[^>]*\bsrc=\"(.*?)\"", text)
        tags += re.findall(
            r"<link[^>]*rel=\"(?:stylesheet|preload|icon)\"[^>]*href=\"(.*?)\"", text
        )
        assert tags and not [tag for tag in tags if tag.startswith(("http", "//"))], page.name


# -- the order -----------------------------------------------------------------------------------------------------


def test_every_page_has_its_place_in_the_order_and_no_other() -> None:
    listed = [name for group in ORDER.values() for name in group]
    assert sorted(["index", *listed]) == sorted(PAGES)


def test_the_site_has_the_order_of_the_index() -> None:
    _, *groups = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    assert [name for group in groups for name in group] == list(ORDER)
    for group in groups:
        for name, entries in group.items():
            site_pages = {
                page.removesuffix(".md"): title
                for entry in entries
                for title, page in entry.items()
            }
            assert list(site_pages.items()) == list(ORDER[name].items())


def test_the_pages_are_short() -> None:
    lines = {
        page.name: len(page.read_text(encoding="utf-8").splitlines())
        for page in (ROOT / "docs").glob("*.md")
    }
    assert sum(lines.values()) <= MAX_LINES


def test_the_reference_is_that_of_the_code() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "reference.py", "--check"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# -- the search ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("wandb", "report faq"),
        ("tensorboard", "report"),
        ("resume", "reliability"),
        ("images", "pictures"),
        ("vlm", "pictures"),
        ("diffusion", "pictures"),
        ("judge", "judges first-judge"),
        ("OpenAI as a judge", "judges first-judge faq"),
        ("openai", "faq first-judge"),
        ("ollama", "faq"),
        ("out of memory", "troubleshooting"),
        ("OOM", "plan"),
        ("lora", "faq options"),
        ("qlora 4bit", "faq options"),
        ("multi-gpu", "several-gpus"),
        ("several GPUs", "several-gpus"),
        ("multi node slurm", "several-machines"),
        ("reward 0", "troubleshooting"),
        ("reward stays 0", "troubleshooting"),
        ("tools", "agents first-tool"),
        ("mcp server", "agents"),
        ("checkpoint", "reliability"),
        ("speed", "faq benchmarks"),
        ("how do I make it faster", "faq"),
        ("which GPU for 7B", "faq"),
        ("windows", "faq"),
        ("mac", "faq"),
        ("learning rate", "algorithms faq"),
        ("dapo", "algorithms"),
        ("ppo critic", "algorithms"),
        ("dpo", "trainers"),
        ("sft", "sft-then-rl trainers"),
        ("reward model", "judges"),
        ("csv", "datasets"),
        ("columns", "datasets trainers"),
        ("gguf", "use"),
        ("export llama.cpp", "use"),
        ("port in use", "troubleshooting"),
        ("engine does not start", "troubleshooting"),
        ("disk full", "troubleshooting"),
        ("docker shm", "troubleshooting"),
        ("chat template", "troubleshooting"),
        ("zero3 fsdp", "parallel"),
        ("benchmark gsm8k", "evaluation"),
        ("pass@k", "evaluation"),
        ("kl", "algorithms metrics"),
        ("entropy", "reading-curves metrics"),
        ("environment game", "own-environment agents"),
        ("sandbox network", "sandbox rewards"),
        ("custom reward function", "rewards first-reward"),
        ("teacher distillation", "algorithms"),
        ("python api", "api"),
        ("offline", "faq"),
        ("how do I use wandb", "report"),
        ("how do I add a tool", "first-tool"),
        ("can I use several gpus", "several-gpus"),
        ("my reward stays 0", "troubleshooting"),
        ("what does advantage mean", "algorithms"),
    ],
)
def test_words_find_the_right_page_first(words: str, page: str) -> None:
    first = search(PAGES, words)[0]
    assert first.page in page.split(), first.address


def test_a_section_can_be_printed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["docs", "port", "in", "use"]) == 0
    address = capsys.readouterr().out.split()[2]
    assert run(["docs", address]) == 0
    section = capsys.readouterr().out
    assert section.startswith("### The port is in use\n") and "--port 8001" in section
    assert run(["docs", "troubleshooting#the-port"]) == 2
    assert "'troubleshooting#the-port-is-in-use'" in capsys.readouterr().err


# -- errors --------------------------------------------------------------------------------------------------------


def messages() -> Iterator[str]:
    """Every text of the package, of the command and of the installer, with dots for its values."""
    for path in [*(ROOT / "ycore").rglob("*.py"), *(ROOT / "cli").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else "..."
                    for part in node.values
                ]
                yield "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
    yield (ROOT / "install.sh").read_text(encoding="utf-8")


QUOTED = [
    (section.heading, words)
    for section in sections("troubleshooting", PAGES["troubleshooting"])
    for line in re.findall(r"^It says: (.+)$", section.text, re.MULTILINE)
    for words in re.findall(r"`([^`]+)`", line)
]


def test_twenty_symptoms_have_a_section() -> None:
    assert len({heading for heading, _ in QUOTED}) >= 20


def test_what_the_troubleshooting_quotes_is_what_ycore_says() -> None:
    said = list(messages())
    invented = [
        words
        for _, words in QUOTED
        if not any(
            re.search(".*".join(map(re.escape, words.split("..."))), text) for text in said
        )
    ]
    assert invented == []


def test_an_error_names_the_section_that_explains_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    words = "grpo --model smollm2-135m --dataset task:addition --reward exact_answer --dry-run"
    assert run([*words.split(), "--output", "full"]) == 2
    line = capsys.readouterr().err
    assert line.endswith("; see `ycore docs troubleshooting#the-output-folder-is-taken`\n")
    assert line.count("\n") == 1


def test_an_error_that_says_it_all_names_no_page() -> None:
    assert explanation("--steps must be a whole number; it is 'x'") == ""
