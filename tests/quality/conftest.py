"""What the house tests look at: the tracked files and the modules of the package."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_NOT_OURS = {".git", ".venv", ".venvs", ".cache", "__pycache__", "build", "dist"}


def _listed_by_git() -> list[str] | None:
    """Tracked files and new ones that are not ignored; None outside a git work tree."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.decode().split("\0") if (ROOT / ".git").exists() else None


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of pyproject.toml."""
    return ROOT


@pytest.fixture(scope="session")
def tracked_files() -> list[Path]:
    """Every file of the project, absolute, sorted."""
    names = _listed_by_git()
    if names is None:
        found = [p for p in ROOT.rglob("*") if not _NOT_OURS & set(p.relative_to(ROOT).parts)]
    else:
        found = [ROOT / name for name in names if name]
    return sorted(p for p in found if p.is_file() and not p.is_symlink())


@pytest.fixture(scope="session")
def package_files(tracked_files: list[Path]) -> dict[str, Path]:
    """``{dotted module name: file}`` for every module of the package."""
    modules = {}
    for path in tracked_files:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] == "dataproto_audit" and path.suffix == ".py":
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules
