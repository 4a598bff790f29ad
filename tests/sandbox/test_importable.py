"""Confined code imports what the user can: each layout of an editable install, namespace packages, zip, working folder."""

import importlib.util
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
from pathlib import Path
SECRET = Path({secret!r})
def score(completions, **columns):
    return [1.0 for _ in completions]
try:
    SECRET.read_text()
except OSError:
    pass
else:
    if SECRET.read_text():
        raise SystemExit("a hidden file is open")
"""
CHECK = """
import sys
from ycore.config.schema import RewardConfig, SandboxSettings
from ycore.rewards.worker_client import check_reward
check_reward(RewardConfig(reward=sys.argv[2]), ["answer", "images", "label"], sandbox=SandboxSettings(level=sys.argv[1]))
"""
SOURCE = """
import {name}
try:
    print({name}.score([1]), bool(open({secret!r}).read()))
except OSError:
    print({name}.score([1]), "hidden")
"""
PROGRAM = """
import asyncio, sys
from pathlib import Path
from ycore.sandbox import Level
from ycore.sandbox.program_pool import ProgramPool
async def run():
    pool = ProgramPool(Level(sys.argv[1]), at_once=1, log=Path("log"), run_id="t", packages=["mine"])
    try:
        return await pool.run(sys.argv[2], deadline_s=30)
    finally:
        await pool.close()
result = asyncio.run(run())
assert result.output in (b"[1.0] hidden\\n", b"[1.0] False\\n"), (result, Path("log").read_text())
"""


class Environment:
    """A virtual environment that sees this one's packages, a project to install into it, and an empty folder to run in."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "venv", symlinks=True)
        self.python = folder / "venv" / "bin" / "python"
        self.site = next((folder / "venv" / "lib").glob("python*/site-packages"))
        packages = [entry for entry in sys.path if "-packages" in entry]
        (self.site / "zz_base.pth").write_text("\n".join(packages))
        ours = {}
        for name in ("ycore", "ycore_cli", "ycore_docs", "ycore_recipes"):
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.submodule_search_locations
            ours[name] = next(iter(spec.submodule_search_locations))
        self.map_packages("ycore", ours)
        self.project = folder / "project"
        self.working = folder / "working"
        self.working.mkdir()
        self.source = self.package("src/mine")

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

    def package(self, name: str) -> Path:
        """Write a package that fails where it can read the project's .env."""
        package = self.project / name
        package.mkdir(parents=True)
        secret = self.project / ".env"
        secret.write_text("TOKEN=1")
        (package / "__init__.py").write_text(CODE.format(secret=str(secret)))
        return package

    def run(self, program: str, *arguments: str, **variables: str) -> None:
        done = subprocess.run(
            [str(self.python), "-c", program, *arguments],
            cwd=self.working,
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    for folder in (tmp_path, *tmp_path.parents):  # also another user may enter
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    return Environment(tmp_path)


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Level:
    if (answer := level_refusal(request.param)) is not None:
        pytest.skip(f"level {request.param} does not hold here: {answer}")
    return Level(request.param)


def by_setuptools(environment: Environment, mode: str = "lenient") -> None:
    """By the real backend: a finder that maps names to folders outside of sys.path, or a folder of links (strict)."""
    pytest.importorskip("setuptools")
    environment.source.rename(environment.project / "mine")
    (environment.project / "helpers.py").write_text("")
    (environment.project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "mine"\nversion = "0.1"\n'
        '[tool.setuptools]\npackages = ["mine"]\npy-modules = ["helpers"]\n'
    )
    build = (
        "import sys; from setuptools.build_meta import build_editable; "
        "build_editable(sys.argv[1], {'editable_mode': sys.argv[2]})"
    )
    wheels = environment.working.parent / "wheels"
    wheels.mkdir()
    subprocess.run(
        [sys.executable, "-c", build, str(wheels), mode],
        cwd=environment.project,
        check=True,
        capture_output=True,
        timeout=240,
    )
    (wheel,) = wheels.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(environment.site)
    init = environment.project / "mine" / "__init__.py"
    init.write_text(f"import helpers\n{init.read_text()}")
    has_finder = bool(list(environment.site.glob("__editable___mine_*_finder.py")))
    assert has_finder == (mode != "strict")


def by_strict_setuptools(environment: Environment) -> None:
    by_setuptools(environment, "strict")


def by_a_path_file(name: str) -> Callable[[Environment], None]:
    """As hatch (_editable_impl_mine.pth), uv (mine.pth) and setuptools' src layout (__editable__.mine-0.1.pth) write."""

    def install(environment: Environment) -> None:
        environment.source.rename(environment.project / "mine")
        (environment.site / name).write_text(str(environment.project))

    return install


def by_hatch_exactly(environment: Environment) -> None:
    """As hatch writes with `dev-mode-exact`, through the package `editables`."""
    (environment.site / "editables.py").write_text(
        "import importlib.abc, importlib.util, sys\n"
        "class F(importlib.abc.MetaPathFinder):\n"
        "    _redirections = {}\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        if name in cls._redirections:\n"
        "            return importlib.util.spec_from_file_location(name, cls._redirections[name])\n"
    )
    (environment.site / "_editable_impl_mine.py").write_text(
        "from editables import F\nimport sys\nsys.meta_path.append(F)\n"
        f"F._redirections['mine'] = {str(environment.source / '__init__.py')!r}\n"
    )
    (environment.site / "_editable_impl_mine.pth").write_text("import _editable_impl_mine\n")


LAYOUTS = {
    "setuptools": by_setuptools,
    "setuptools strict": by_strict_setuptools,
    "setuptools src": by_a_path_file("__editable__.mine-0.1.pth"),
    "hatch": by_a_path_file("_editable_impl_mine.pth"),
    "hatch exact": by_hatch_exactly,
    "uv": by_a_path_file("mine.pth"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_editable_package_is_imported_and_its_secrets_stay_hidden(
    layout: str, environment: Environment, level: Level
) -> None:
    LAYOUTS[layout](environment)
    environment.run(CHECK, level, "mine:score")


@pytest.mark.parametrize("layout", ["setuptools", "uv"])
def test_programs_of_a_model_import_an_editable_package_too(
    layout: str, environment: Environment, level: Level
) -> None:
    (environment.source / "__init__.py").write_text("def score(values): return [1.0]")
    LAYOUTS[layout](environment)
    secret = str(environment.project / ".env")
    environment.run(PROGRAM, level, SOURCE.format(name="mine", secret=secret))


def test_a_namespace_package_is_imported(environment: Environment, level: Level) -> None:
    """As setuptools' finder maps it: the namespace's folder is no package itself."""
    inner = environment.package("lib/shared/inner")
    environment.map_packages(
        "shared", {"shared.inner": str(inner)}, {"shared": [str(inner.parent)]}
    )
    environment.run(CHECK, level, "shared.inner:score")


def test_a_zip_archive_and_the_working_folder_are_imported(
    environment: Environment, level: Level
) -> None:
    with zipfile.ZipFile(environment.project / "packed.zip", "w") as archive:
        archive.writestr("packed/__init__.py", CODE.format(secret=os.devnull))
    archives = str(environment.project / "packed.zip")
    environment.run(CHECK, level, "packed:score", PYTHONPATH=archives)
    (environment.working / "near").mkdir()
    (environment.working / "near" / "rules.py").write_text("from packed import score")
    environment.run(CHECK, level, "near.rules:score", PYTHONPATH=archives)


def test_ycore_s_own_recipes_are_imported_outside_of_its_clone(
    environment: Environment, level: Level
) -> None:
    environment.run(CHECK, level, "ycore_recipes.digits:hits")
