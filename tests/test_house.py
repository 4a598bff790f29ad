"""The house: its size, which room may import which, what things are called, and what no file may say.

Size is counted in code tokens: what Python's tokenizer yields without comments, docstrings and layout. Counting lines
would reward packing several statements into one. Raise a limit only on purpose, in a commit of its own.
"""

import ast
import io
import re
import statistics
import subprocess
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(
    [
        *(ROOT / "ycore").rglob("*.py"),
        *(ROOT / "cli").rglob("*.py"),
        *(ROOT / "recipes").rglob("*.py"),
    ]
)
BENCHMARKS = sorted((ROOT / "docs" / "benchmarks").rglob("*.py"))
ALL_SOURCES = [
    *SOURCES,
    *sorted((ROOT / "docs").rglob("*.py")),
    *sorted((ROOT / "tests").rglob("*.py")),
]

MAX_TOKENS = 306_900
MAX_TOKENS_PER_LINE = 8.17
MAX_FILES = 203
MAX_FUNCTION_TOKENS = 500
MAX_MEAN_IMPORTS = 5.65
"""Modules of ycore that a file imports: a reader who opens it must know these too."""
MAX_IMPORTS = 21
MAX_VAGUE_NAMES = 30
MAX_SHARED_CLASS_NAMES = 0
MAX_SHARED_FUNCTION_NAMES = 1
MAX_HEADLESS_DOCSTRINGS = 0

FEWEST_CODE_LINES = 40
"""Code lines of a file with one importer: a smaller one belongs beside its importer."""

VAGUE = frozenset(
    [
        *(
            "one",
            "ones",
            "how",
            "told",
            "held",
            "found",
            "way",
            "ways",
            "own",
            "asked",
            "shown",
        ),
        *("given", "others", "here", "there", "so", "each", "what", "lately"),
    ]
)
"""Names of variables that do not say what they hold."""
HEADLESS = (
    *(
        "What ",
        "Of ",
        "Those ",
        "That ",
        "As ",
        "The same",
        "So much",
        "So many",
        "So long",
        "Whose ",
    ),
    *("In the ", "From the ", "For as "),
)
"""Beginnings of docstrings that are neither an imperative nor a sentence with a subject."""
LAYOUT = frozenset(
    {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)

# From the ground up: a room may import the rooms before it, and itself.
ROOMS = [
    *(
        "errors",
        "foreign",
        "types",
        "advantages",
        "run",
        "sandbox",
        "config",
        "models",
        "data",
        "rewards",
        "judge",
    ),
    *(
        "placement",
        "engine",
        "rollout",
        "scoring",
        "view",
        "round",
        "plan",
        "trl",
        "evaluation",
    ),
    *("trainer", "flow", "launch", "api", "cli"),
]
HEAVY = {
    "torch",
    "transformers",
    "trl",
    "vllm",
    "datasets",
    "accelerate",
    "peft",
    "deepspeed",
    "matplotlib",
}
MAY_BE_HEAVY = {"rollout", "scoring", "round", "flow", "trl"}
HEAVY_FILES = {
    "engine/transformers_engine.py",
    "engine/vllm_extension.py",
    "engine/shared_bucket.py",
    "engine/weight_proof.py",
    "engine/weights.py",
    "evaluation/during_training.py",
    "trainer/example_run.py",
    "trainer/rollout_run.py",
    "view/trackers.py",
    "trainer/training_run.py",
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] != "ycore":
        parts[0] = f"ycore_{parts[0]}"
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[1].removesuffix(".py") if parts[0] == "ycore" else parts[0]


FILES = {name_of(path): path for path in SOURCES}


@cache
def imports(path: Path) -> frozenset[str]:
    """Return every module that a file imports, at any depth of its code; of ours, the file that it reaches."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in FILES else node.module for name in inner.values()}
    return frozenset(names)


def imports_at_the_top(path: Path) -> set[str]:
    nodes = [
        node for node in tree_of(path).body if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    names = {
        alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
    }
    return {
        name.partition(".")[0]
        for name in names | {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}
    }


def num_code_lines(path: Path) -> int:
    """Count lines that are neither blank, nor an import, nor the module's docstring."""
    tree, skipped = tree_of(path), set[int]()
    docstring = tree.body[:1] if ast.get_docstring(tree) else []
    for node in [
        *docstring,
        *(n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)),
    ]:
        skipped |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = path.read_text().splitlines()
    return sum(
        1 for number, line in enumerate(lines, 1) if line.strip() and number not in skipped
    )


@cache
def tokens_by_line(path: Path) -> Counter[int]:
    """Count the code tokens on each line that has any."""
    docstring_lines = set[int]()
    for docstring in docstrings(path):
        docstring_lines |= set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    counts = Counter[int]()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        line = token.start[0]
        if (
            token.type not in LAYOUT
            and token.type != tokenize.COMMENT
            and line not in docstring_lines
        ):
            counts[line] += 1
    return counts


def docstrings(path: Path) -> Iterator[ast.Constant]:
    """Yield strings that stand as statements: docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree_of(path)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def names_bound_in(path: Path) -> Iterator[str]:
    """Yield variables and parameters, once for each place that binds them."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        if isinstance(node, ast.arg):
            yield node.arg


def names_of_several_things(names_by_file: dict[Path, set[str]]) -> list[str]:
    counts = Counter(name for names in names_by_file.values() for name in names)
    return sorted(name for name, count in counts.items() if count > 1)


def test_the_whole_stays_small() -> None:
    assert 40 < len(SOURCES) <= MAX_FILES
    num_tokens = sum(tokens_by_line(path).total() for path in SOURCES)
    num_lines = sum(len(tokens_by_line(path)) for path in SOURCES)
    assert num_tokens <= MAX_TOKENS
    assert num_tokens / num_lines <= MAX_TOKENS_PER_LINE


def test_a_file_needs_few_others() -> None:
    counts = {path: len(modules_of_ours(path)) for path in SOURCES}
    largest = max(counts, key=lambda path: counts[path])
    assert statistics.mean(counts.values()) <= MAX_MEAN_IMPORTS
    assert counts[largest] <= MAX_IMPORTS, (
        f"{largest} imports {counts[largest]} modules of ycore"
    )


def modules_of_ours(path: Path) -> set[str]:
    ours = ("ycore", "ycore_cli", "ycore_recipes")
    modules = set[str]()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    return {module for module in modules if module.partition(".")[0] in ours}


def test_a_name_means_one_thing() -> None:
    classes = {
        path: {node.name for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)}
        for path in SOURCES
    }
    functions = {
        path: {
            node.name
            for node in tree_of(path).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        for path in SOURCES
    }
    # Every file of ycore/trl calls its trainer `Trainer`; private names are of one file.
    shared_classes = [
        name
        for name in names_of_several_things(classes)
        if name != "Trainer" and name[0] != "_"
    ]
    shared_functions = [name for name in names_of_several_things(functions) if name[0] != "_"]
    assert len(shared_classes) <= MAX_SHARED_CLASS_NAMES, shared_classes
    assert len(shared_functions) <= MAX_SHARED_FUNCTION_NAMES, shared_functions


def test_variables_say_what_they_hold() -> None:
    vague = Counter(
        name for path in SOURCES for name in names_bound_in(path) if name.strip("_") in VAGUE
    )
    assert vague.total() <= MAX_VAGUE_NAMES, vague


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_constant_has_one_value(path: Path) -> None:
    """A function reads a constant when it is called, so a second value changes what stands above it."""
    names = Counter(
        target.id
        for node in tree_of(path).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in ast.walk(node)
        if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store)
    )
    assert [name for name, count in names.items() if count > 1 and name.isupper()] == []


def test_variables_of_benchmarks_say_what_they_hold() -> None:
    vague = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in BENCHMARKS
        for name in names_bound_in(path)
        if name.strip("_") in VAGUE
    ]
    assert BENCHMARKS and vague == []


def test_docstrings_are_sentences() -> None:
    headless = [
        f"{path.relative_to(ROOT)}:{docstring.lineno}"
        for path in ALL_SOURCES
        for docstring in docstrings(path)
        if str(docstring.value).lstrip().startswith(HEADLESS)
    ]
    assert len(headless) <= MAX_HEADLESS_DOCSTRINGS, headless


def test_no_two_files_share_a_name() -> None:
    counts = Counter(path.name for path in SOURCES if path.name != "__init__.py")
    assert [name for name, count in counts.items() if count > 1] == []


def test_no_small_file_has_one_importer() -> None:
    importers = defaultdict[str, set[Path]](set)
    for path in SOURCES:
        for name in imports(path) & FILES.keys() - {name_of(path)}:
            importers[name].add(path)
    small = [
        name
        for name, path in FILES.items()
        if num_code_lines(path) < FEWEST_CODE_LINES and path.stem[0] != "_"
    ]
    assert [name for name in small if len(importers[name]) == 1] == []


def test_no_files_import_each_other() -> None:
    graph = {name: imports(path) & FILES.keys() - {name} for name, path in FILES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_between_rooms(path: Path) -> None:
    room = room_of(path)
    known = {name.split(".")[1] for name in imports(path) if name.startswith("ycore.")} - {room}
    if room in ("__init__", "recipes"):
        assert not known
        return
    below = set(ROOMS[: ROOMS.index(room)])
    assert known <= below, f"{room} must not know {sorted(known - below)}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_shape(path: Path) -> None:
    tree = tree_of(path)
    assert ast.get_docstring(tree), "every file opens with what it is"
    assert path.name != "utils.py"
    for node in functions_of(path):
        lines = range(node.lineno, (node.end_lineno or 0) + 1)
        num_tokens = sum(tokens_by_line(path)[line] for line in lines)
        assert num_tokens <= MAX_FUNCTION_TOKENS, f"{node.name} has {num_tokens} tokens"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_imports_wait(path: Path) -> None:
    """The command line answers at once because nothing on its way imports these at the top of a file."""
    relative = (
        str(path.relative_to(ROOT / "ycore"))
        if path.is_relative_to(ROOT / "ycore")
        else path.name
    )
    if room_of(path) in MAY_BE_HEAVY or relative in HEAVY_FILES:
        return
    assert not imports_at_the_top(path) & HEAVY


FOREIGN_SOURCES = {
    "httpx": {
        "run/address.py",  # the client of all that is not ours
        "engine/server.py",  # engines of the run, on sockets of its folder
        "scoring/best_of.py",  # the server that it is in
        *("models/names.py", "models/fetch.py", "data/source.py"),  # errors of the hub's client
    },
    "huggingface_hub": {
        *("models/names.py", "models/fetch.py", "data/source.py"),
        "api/trained.py",  # pushes
    },
    "datasets.load_dataset": {"data/source.py"},
    **{
        name: set()
        for name in (
            *("urllib", "urllib3", "http", "requests", "aiohttp", "ftplib", "smtplib"),
            *("websockets", "xmlrpc", "telnetlib", "pycurl", "marshal", "shelve"),
        )
    },
    "urllib.parse": {"data/generated.py"},  # words of a dataset's name
    "http.client": {"engine/server.py"},
    "http.cookiejar": {"run/address.py"},
    "http.server": {"rollout/agent_host.py"},  # confined
    "pickle": {"engine/shared_bucket.py"},  # of the trainer, on the engine's own socket
    "socket": {  # between our own processes, and tries of what must not work
        *("sandbox/level.py", "sandbox/canaries.py", "sandbox/program_server.py"),
        *("sandbox/program_pool.py", "sandbox/confined_worker.py"),
        "launch/machines.py",  # the run's own, whose messages pass the gate
        "engine/server.py",
        *("launch/processes.py", "engine/serve.py"),  # a pair between our processes
    },
}
"""Modules that read what others send, and the files that may import them; a name stands for what is below it."""
OPENS_CONNECTIONS = re.compile(
    r"\b(?:create_connection|open_connection|urlopen|urlretrieve)\(|[\"\'](?:curl|wget|nc)[\"\'],"
)
PARSES_JSON = re.compile(r"\b(?:response|answer|reply)\.json\(|\bjson\.loads?\b")
PARSES_OWN_JSON = {
    "foreign.py",  # the gate
    "run/files.py",  # the bounded reader of files
    *("run/metrics.py", "run/resuming.py", "run/secrets.py", "run/trace.py"),
    *("run/work.py", "view/trackers.py", "evaluation/side_by_side.py"),  # files of a run
    *("api/functions.py", "api/pipelines.py", "api/shown_rows.py"),
    *("config/trl_fields.py", "data/generated.py"),  # words of a command line
    *("data/cells.py", "data/source.py"),  # rows, whose lines and cells are bounded
    *(
        "plan/devices.py",
        "models/model_facts.py",
        "sandbox/syscall_filter.py",
    ),  # tables of ours
    *(
        "placement/service.py",
        "round/peers.py",
        "engine/server.py",
        "engine/serve.py",
        "launch/processes.py",
        "types.py",
    ),  # our processes
    *("sandbox/level.py", "sandbox/canaries.py", "sandbox/stage.py", "sandbox/channel.py"),
    *("sandbox/program_pool.py", "sandbox/program_server.py", "sandbox/unit_tests.py"),
    "sandbox/remote_calls.py",  # confined, as are the next
    *("rewards/builtin.py", "rewards/code.py", "rewards/worker.py", "rollout/agent_host.py"),
    *("rollout/tool_host.py", "rollout/tool_pool.py", "rollout/writers.py"),  # what we dumped
    *(
        "flow/picture_rounds.py",
        "flow/flow_inputs.py",
        "models/gguf_file.py",
        "engine/sight.py",
    ),
}
"""Files that parse JSON by themselves; all others take `foreign_json`, `parse_json` or `read_json`, which are bounded."""


def foreign_readings(source: str, relative: str) -> list[str]:
    """Name what a file reads past the gate for foreign text and the client of foreign addresses."""
    readings, names = [], set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= {node.value} & FOREIGN_SOURCES.keys() - {"http", "socket"}
    for name in sorted(names):
        modules = [module for module in FOREIGN_SOURCES if f"{name}.".startswith(f"{module}.")]
        if modules and relative not in FOREIGN_SOURCES[max(modules, key=len)]:
            readings.append(f"{name} reads what others send: take ycore.run.address")
    is_between_machines = relative == "launch/machines.py"
    if not is_between_machines and (match := OPENS_CONNECTIONS.search(source)):
        readings.append(f"{match[0]} opens an address: take ycore.run.address")
    if relative not in PARSES_OWN_JSON and (match := PARSES_JSON.search(source)):
        readings.append(f"{match[0]} parses JSON: take ycore.foreign.foreign_json")
    return readings


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_foreign_text_has_one_gate_and_foreign_addresses_one_client(path: Path) -> None:
    relative = path.relative_to(ROOT).as_posix().removeprefix("ycore/")
    assert foreign_readings(path.read_text(), relative) == []


@pytest.mark.parametrize(
    "source",
    [
        "import httpx",
        "def f():\n    import urllib.request as u",
        "from urllib import request",
        "from urllib.request import urlopen",
        "import urllib3",
        "import importlib\nimportlib.import_module('requests')",
        "from http import client",
        "import socket\nsocket.socket()",
        "from datasets import load_dataset",
        "from huggingface_hub import hf_hub_download",
        "asyncio.open_connection('a', 1)",
        "subprocess.run(['curl', 'https://a'])",
        "import pickle",
        "from json import loads\njson.loads(text)",
        "value = reply.json()",
        "list(map(json.loads, lines))",
    ],
)
def test_what_reads_past_the_gate_is_caught(source: str) -> None:
    assert len(foreign_readings(source, "rollout/new_file.py")) == 1
    assert foreign_readings("from ycore.foreign import foreign_json", "rollout/a.py") == []


def test_no_file_names_a_machine() -> None:
    private = re.compile("/" + r"work/|/" + r"root/|/opt/" + r"wheels|pypi\.org/" + "simple")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    ours = [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    assert len(ours) > 40
    offenders = [
        str(path.relative_to(ROOT))
        for path in ours
        if private.search(path.read_text(errors="ignore"))
    ]
    assert offenders == []


def is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    broad = {"Exception", "BaseException", "BaseExceptionGroup", "ExceptionGroup"}
    return any(kind is None or getattr(kind, "id", None) in broad for kind in kinds)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_whoever_catches_everything_says_why_or_raises_it_again(path: Path) -> None:
    lines = path.read_text().splitlines()
    silent = [
        f"{path.relative_to(ROOT)}:{handler.lineno}"
        for handler in ast.walk(tree_of(path))
        if isinstance(handler, ast.ExceptHandler)
        and is_broad(handler)
        # A bare `raise` at the end only clears up first.
        and not (isinstance(end := handler.body[-1], ast.Raise) and end.exc is None)
        and not re.search(r"#.*\w+ \w+ \w+", lines[handler.lineno - 1])
    ]
    assert silent == []
