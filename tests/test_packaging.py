"""What is installed is what is in the repository, and it works without the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
ROOTS = {"vllm_delta": REPOSITORY, "vllm_delta_kernels": REPOSITORY / "kernels"}
NOT_SHIPPED = {"__pycache__", ".ruff_cache", ".mypy_cache"}


def run(*command: str, cwd: Path, **environment: str) -> str:
    """Runs a command, fails with its output, and returns its stdout."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=240,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def source_files() -> dict[str, bytes]:
    """Every file of the packages, by its path inside a wheel."""
    files = {}
    for package, root in ROOTS.items():
        for path in (root / package).rglob("*"):
            if path.is_file() and not NOT_SHIPPED.intersection(path.parts):
                files[path.relative_to(root).as_posix()] = path.read_bytes()
    return files


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from the sdist built from a copy of the tracked files."""
    work = tmp_path_factory.mktemp("build")
    copy = work / "source"
    listed = run(
        "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=REPOSITORY
    )
    for name in filter(None, listed.split("\0")):
        if (REPOSITORY / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((REPOSITORY / name).read_bytes())
    # No isolation: setuptools is in the environment, so the build needs no network. Without
    # --sdist and --wheel, build makes the sdist first and the wheel from what is in it.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(work / "dist"), cwd=copy)
    (built,) = (work / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content in a folder of its own, far from the repository."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.mark.timeout(300)
def test_wheel_from_sdist_holds_exactly_the_source(wheel: Path) -> None:
    """Every file of both packages is in the wheel byte for byte, and nothing else is."""
    with zipfile.ZipFile(wheel) as archive:
        shipped = {
            name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name
        }
    source = source_files()
    assert sorted(shipped) == sorted(source)
    assert [name for name in source if shipped[name] != source[name]] == []
    assert "vllm_delta/FORMAT.md" in shipped


def test_wheel_carries_licence_and_entry_points(installed: Path) -> None:
    """The command, the plugin that vLLM loads and the licence reach whoever installs the wheel."""
    (info,) = installed.glob("*.dist-info")
    entries = ConfigParser()
    entries.optionxform = str  # type: ignore[assignment,method-assign]
    entries.read_string((info / "entry_points.txt").read_text())
    assert dict(entries["console_scripts"]) == {"vllm-delta": "vllm_delta.cli:main"}
    assert dict(entries["vllm.general_plugins"]) == {
        "vllm_delta": "vllm_delta.engine.plugin:register"
    }
    shipped = (info / "licenses" / "LICENSE").read_bytes()
    assert shipped == (REPOSITORY / "LICENSE").read_bytes()


def test_wheel_works_with_the_source_moved_away(installed: Path, tmp_path: Path) -> None:
    """Imported from the wheel alone, the package packs and reads a schema and the CLI answers."""
    program = (
        "import sys, vllm_delta, vllm_delta.format as f, vllm_delta.cli as c\n"
        "spec = f.TensorSpec('w', 'BF16', (2, 3))\n"
        "schema = f.Schema((spec,))\n"
        "assert f.parse_schema(schema.to_bytes()) == schema\n"
        "assert 'torch' not in sys.modules and 'vllm' not in sys.modules\n"
        "print(vllm_delta.__file__, f.__file__, c.__file__, sep='\\n')\n"
    )
    # -P leaves the working directory out; the editable install would put the source back in, so
    # its finders are switched off by -S and the third-party folder is named instead.
    third_party = os.pathsep.join(path for path in sys.path if "site-packages" in path)
    path = os.pathsep.join([str(installed), third_party])
    output = run(sys.executable, "-P", "-S", "-c", program, cwd=tmp_path, PYTHONPATH=path)
    assert [line for line in output.splitlines() if not line.startswith(str(installed))] == []
    answer = run(
        sys.executable, "-P", "-S", "-m", "vllm_delta.cli", "--help", cwd=tmp_path, PYTHONPATH=path
    )
    assert all(command in answer for command in ("ls", "show", "verify", "apply"))


def test_import_of_the_package_stays_light(installed: Path, tmp_path: Path) -> None:
    """vLLM imports the package in every process, so the bare import loads no third party."""
    program = (
        "import sys; before = set(sys.modules)\n"
        "import vllm_delta\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(new - set(sys.stdlib_module_names)))\n"
    )
    output = run(sys.executable, "-P", "-S", "-c", program, cwd=tmp_path, PYTHONPATH=str(installed))
    assert output.split() == ["vllm_delta"]


def test_kernels_folder_is_no_package() -> None:
    """An `__init__.py` in kernels/ would shadow Hugging Face's package of that name."""
    assert not (REPOSITORY / "kernels" / "__init__.py").exists()
