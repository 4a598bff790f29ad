"""Confined code imports what the user can: each layout of an editable install, namespace packages, zip, working folder."""

import importlib.util
import json
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ycore.sandbox import Level
from ycore.sandbox.level import level_refusal

LEVELS = [Level.NAMESPACES, Level.LANDLOCK]
CODE = """
def score(completions, **columns):
    return [1.0 for _ in completions]
def read_secret():
    with open({secret!r}) as file:
        return file.read()
"""
REWARD = """
from {module} import read_secret, score
try:
    assert not read_secret(), "a hidden file is open"
except OSError:
    pass
"""
CHECK = """
import json, sys
from ycore.config.schema import RewardConfig, SandboxSettings
from ycore.errors import YcoreError
from ycore.rewards.worker_client import check_reward
problems = {}
for name in sys.argv[2:]:
    try:
        check_reward(RewardConfig(reward=name), ["images", "label"], sandbox=SandboxSettings(level=sys.argv[1]))
    except YcoreError as error:
        problems[name] = str(error)
print(json.dumps(problems))
"""
PROGRAM = """
import {module}
try:
    print({module}.score([1]), bool({module}.read_secret()))
except OSError:
    print({module}.score([1]), False)
"""
RUN = """
import asyncio, json, sys
from pathlib import Path
from ycore.sandbox import Level
from ycore.sandbox.program_pool import ProgramPool
async def run():
    names = sys.argv[2::2]
    pool = ProgramPool(Level(sys.argv[1]), at_once=1, log=Path("log"), run_id="t", packages=names)
    try:
        sources = zip(names, sys.argv[3::2], strict=True)
        return {name: repr(await pool.run(source, deadline_s=30)) for name, source in sources}
    finally:
        await pool.close()
print(json.dumps(asyncio.run(run())))
"""


class Environment:
    """A virtual environment on top of this one, with packages installed from their places, and an empty folder."""

    def __init__(self, folder: Path) -> None:
        for outer in (folder, *folder.parents):  # also another user may enter
            if outer.stat().st_uid == os.geteuid() and outer != Path("/"):
                outer.chmod(outer.stat().st_mode | 0o055)
        self.folder = folder
        venv.create(folder / "venv", symlinks=True)
        self.python = folder / "venv" / "bin" / "python"
        self.site = next((folder / "venv" / "lib").glob("python*/site-packages"))
        packages = [entry for entry in sys.path if "-packages" in entry]
        (self.site / "zz_base.pth").write_text("\n".join(packages))
        self.working = folder / "working"
        self.working.mkdir()
        ours = {}
        for name in ("ycore", "ycore_cli", "ycore_docs", "ycore_recipes"):
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.submodule_search_locations
            ours[name] = next(iter(spec.submodule_search_locations))
        self.map_packages("ycore", ours)

    def map_packages(
        self, name: str, mapping: dict[str, str], namespaces: dict[str, list[str]] | None = None
    ) -> None:
        """Install packages from their places as setuptools does, by a finder."""
        editable_wheel = pytest.importorskip("setuptools.command.editable_wheel")
        finder = editable_wheel._finder_template(name, mapping, namespaces or {})
        (self.site / f"__editable___{name}_finder.py").write_text(finder)
        (self.site / f"__editable__.{name}.pth").write_text(
            f"import __editable___{name}_finder; __editable___{name}_finder.install()"
        )

    def project(self, name: str, package: str) -> Path:
        """Write a project with a package whose `read_secret` reads the project's .env, and a reward that may not."""
        project = self.folder / "projects" / name
        (project / package).mkdir(parents=True)
        secret = project / ".env"
        secret.write_text("TOKEN=1")
        (project / package / "__init__.py").write_text(CODE.format(secret=str(secret)))
        module = package.removeprefix("src/").replace("/", ".")
        (self.working / f"use_{name}.py").write_text(REWARD.format(module=module))
        return project

    def run(self, program: str, *arguments: str) -> dict[str, str]:
        done = subprocess.run(
            [str(self.python), "-c", program, *arguments],
            cwd=self.working,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(self.folder / "packed.zip"),
            },
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return dict(json.loads(done.stdout))


def by_setuptools(environment: Environment, name: str, mode: str = "lenient") -> None:
    """Install by setuptools: a finder mapping names to folders outside of sys.path, or a folder of links (strict)."""
    pytest.importorskip("setuptools")
    project = environment.project(name, name)
    (project / f"{name}_helpers.py").write_text("")
    init = project / name / "__init__.py"
    init.write_text(f"import {name}_helpers\n{init.read_text()}")
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        f'[project]\nname = "{name}"\nversion = "0.1"\n'
        f'[tool.setuptools]\npackages = ["{name}"]\npy-modules = ["{name}_helpers"]\n'
    )
    build = (
        "import sys; from setuptools.build_meta import build_editable; "
        "build_editable(sys.argv[1], {'editable_mode': sys.argv[2]})"
    )
    wheels = environment.folder / "wheels" / name
    wheels.mkdir(parents=True)
    subprocess.run(
        [sys.executable, "-c", build, str(wheels), mode],
        cwd=project,
        check=True,
        capture_output=True,
        timeout=240,
    )
    (wheel,) = wheels.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(environment.site)
    has_finder = bool(list(environment.site.glob(f"__editable___{name}_*_finder.py")))
    assert has_finder == (mode != "strict")


def by_strict_setuptools(environment: Environment, name: str) -> None:
    by_setuptools(environment, name, "strict")


def by_a_path_file(form: str, package: str = "{}") -> Callable[[Environment, str], None]:
    """Install as hatch, uv and setuptools do; a flat project shows all of it but what is hidden."""

    def install(environment: Environment, name: str) -> None:
        project = environment.project(name, package.format(name))
        source = (project / package.format(name)).parent
        (environment.site / form.format(name)).write_text(str(source))

    return install


def by_hatch_exactly(environment: Environment, name: str) -> None:
    """Install as hatch does with `dev-mode-exact`, through the package `editables`."""
    project = environment.project(name, f"src/{name}")
    (environment.site / "editables.py").write_text(
        "import importlib.abc, importlib.util, sys\n"
        "class F(importlib.abc.MetaPathFinder):\n"
        "    _redirections = {}\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        if name in cls._redirections:\n"
        "            return importlib.util.spec_from_file_location(name, cls._redirections[name])\n"
    )
    init = project / "src" / name / "__init__.py"
    (environment.site / f"_editable_impl_{name}.py").write_text(
        "from editables import F\nimport sys\nsys.meta_path.append(F)\n"
        f"F._redirections[{name!r}] = {str(init)!r}\n"
    )
    (environment.site / f"_editable_impl_{name}.pth").write_text(
        f"import _editable_impl_{name}\n"
    )


def by_a_link(environment: Environment, name: str) -> None:
    """Install as `flit install --symlink` does."""
    project = environment.project(name, name)
    (environment.site / name).symlink_to(project / name)


LAYOUTS: dict[str, Callable[[Environment, str], None]] = {
    "setuptools": by_setuptools,
    "setuptools_strict": by_strict_setuptools,
    "setuptools_src": by_a_path_file("__editable__.{}-0.1.pth", "src/{}"),
    "setuptools_old": by_a_path_file("__editable__.{}-0.1.pth"),
    "hatch": by_a_path_file("_editable_impl_{}.pth"),
    "hatch_exact": by_hatch_exactly,
    "uv": by_a_path_file("{}.pth", "src/{}"),
    "uv_flat": by_a_path_file("{}.pth"),
    "flit": by_a_link,
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made = Environment(tmp_path_factory.mktemp("importable"))
    for layout, install in LAYOUTS.items():
        install(made, f"by_{layout}")
    project = made.project("namespace", "lib/shared/inner")
    (made.working / "use_namespace.py").write_text(REWARD.format(module="shared.inner"))
    shared = project / "lib" / "shared"
    made.map_packages(
        "shared", {"shared.inner": str(shared / "inner")}, {"shared": [str(shared)]}
    )
    with zipfile.ZipFile(made.folder / "packed.zip", "w") as archive:
        archive.writestr("packed/__init__.py", CODE.format(secret=os.devnull))
    (made.working / "near").mkdir()
    (made.working / "near" / "rules.py").write_text("from packed import score")
    return made


@pytest.fixture(scope="module", params=LEVELS)
def level(request: pytest.FixtureRequest) -> Level:
    if (answer := level_refusal(request.param)) is not None:
        pytest.skip(f"level {request.param} does not hold here: {answer}")
    return Level(request.param)


REWARDS = [
    *(f"use_by_{layout}:score" for layout in LAYOUTS),
    *("use_namespace:score", "packed:score", "near.rules:score", "ycore_recipes.digits:hits"),
]


@pytest.fixture(scope="module")
def problems(environment: Environment, level: Level) -> dict[str, str]:
    return environment.run(CHECK, level, *REWARDS)


@pytest.mark.parametrize("reward", REWARDS)
def test_a_reward_imports_what_the_user_can_and_reads_no_secret_beside_it(
    reward: str, problems: dict[str, str]
) -> None:
    assert reward not in problems, problems[reward]


def test_a_program_of_a_model_imports_editable_packages_too(
    environment: Environment, level: Level
) -> None:
    names = [f"by_{layout}" for layout in LAYOUTS]
    programs = [part for name in names for part in (name, PROGRAM.format(module=name))]
    results = environment.run(RUN, level, *programs)
    assert {name for name in names if "[1.0] False" not in results[name]} == set(), results
