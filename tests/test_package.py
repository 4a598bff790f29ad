"""The wheel: what it brings, what it must not bring, and that its command works where no checkout lies near."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what git tracks, or would: a build in the checkout would leave its folders there."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(output), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stderr[-2000:]
    said = built.stdout + built.stderr
    assert "would be ignored" not in said, (
        "a folder with files is no package of pyproject.toml; pip warns of it"
    )
    return next(output.glob("*.whl"))


def test_top_level_names(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"ycore", "ycore_cli", "ycore_docs", "ycore_recipes"}
    assert {
        "ycore_recipes/quickstart.yaml",
        "ycore_docs/skill.md",
        "ycore_docs/rewards.md",
        "ycore/py.typed",
        "ycore/config/trl_fields.json",
    } <= set(names)
    packages = {str(path.parent.relative_to(ROOT)) for path in (ROOT / "ycore").rglob("*.py")}
    missing = packages - {name.rpartition("/")[0] for name in names}
    assert not missing, f"pyproject.toml does not name {sorted(missing)}"


def test_the_command_works_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """In a new environment; its dependencies are lent from this one, which took minutes to install."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    site = next((tmp_path / "venv" / "lib").glob("python3*")) / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    lent = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    (site / "lent.pth").write_text(f"import sys; sys.path.append({str(lent)!r})\n")
    script = "import sys, ycore_cli.main as m; sys.argv = ['ycore', 'recipes']; print(m.__file__); sys.exit(m.main())"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert str(site) in done.stdout.splitlines()[0]
    assert "quickstart" in done.stdout
