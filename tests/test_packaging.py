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
ROOTS = {"vllm_delta": ".", "vllm_delta_kernels": "kernels"}


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


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository as a clone would have it, so that nothing else is picked up."""
    copy = tmp_path_factory.mktemp("source")
    listed = run(
        "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=REPOSITORY
    )
    for name in filter(None, listed.split("\0")):
        if (REPOSITORY / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((REPOSITORY / name).read_bytes())
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from the sdist that was built from the source."""
    out = tmp_path_factory.mktemp("dist")
    # No isolation: setuptools is in the environment, so the build needs no network. Without
    # --sdist and --wheel, build makes the sdist first and the wheel from what is in it.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), cwd=source)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content in a folder of its own, far from the repository."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_wheel_from_sdist_holds_exactly_the_source(source: Path, wheel: Path) -> None:
    """Every file of both packages is in the wheel byte for byte, and nothing else is."""
    expected = {
        path.relative_to(source / root).as_posix(): path.read_bytes()
        for package, root in ROOTS.items()
        for path in (source / root / package).rglob("*")
        if path.is_file()
    }
    with zipfile.ZipFile(wheel) as archive:
        shipped = {
            name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name
        }
    assert sorted(shipped) == sorted(expected)
    assert [name for name in expected if shipped[name] != expected[name]] == []
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


def make_environment(folder: Path) -> subprocess.CompletedProcess[str]:
    """Asks scripts/_env.sh for the environment in `folder`."""
    return subprocess.run(
        ["bash", str(REPOSITORY / "scripts" / "_env.sh"), "path"],
        env={**os.environ, "DELTA_ENV_DIR": str(folder)},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )


def test_scripts_leave_a_folder_alone_that_is_no_environment(tmp_path: Path) -> None:
    """A mistaken DELTA_ENV_DIR is refused by name and nothing in it changes."""
    (tmp_path / "thesis.txt").write_text("draft")
    done = make_environment(tmp_path)
    assert done.returncode != 0
    assert str(tmp_path) in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_scripts_use_an_environment_they_did_not_make_as_it_is(tmp_path: Path) -> None:
    """An environment of the user's own is taken, and nothing is installed into it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    done = make_environment(tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}\n")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["bin", "python"]
