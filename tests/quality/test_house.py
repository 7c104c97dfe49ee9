"""Rules of the house that a script can see."""

import ast
import re
from pathlib import Path

import pytest

MAX_LINES = 400

# Written so that none of them matches its own text.
REGISTRY_HOST = re.compile(
    r"https?://[^ \"'`]*/simp[l]e|registry = \"htt[p]|resolved\": \"htt[p]"
    r"|files\.pythonhosted\.or[g]|registry\.npmjs\.or[g]"
)
MACHINE_PATH = re.compile(r"(?:^|[^A-Za-z0-9_.])/(?:work|farm|opt/wheels|root|home/[a-z]+)/")
UNFINISHED = re.compile(r"\b(?:TOD[O]|FIXM[E]|XX[X])\b")


def _text(path: Path) -> str:
    """The text of ``path``, empty for a binary file."""
    data = path.read_bytes()
    return "" if b"\0" in data[:8000] else data.decode("utf-8", errors="replace")


def _assert_nowhere(pattern: re.Pattern[str], files: list[Path], root: Path) -> None:
    found = [
        f"{path.relative_to(root)}:{number}: {line.strip()[:120]}"
        for path in files
        for number, line in enumerate(_text(path).splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)


def test_modules_stay_small(package_files: dict[str, Path]) -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in package_files.items()}
    too_long = [f"{name}: {n} lines" for name, n in lines.items() if n > MAX_LINES]
    assert not too_long, "\n".join(too_long)


def test_nothing_is_left_unfinished(tracked_files: list[Path], root: Path) -> None:
    files = [p for p in tracked_files if p.suffix in {".py", ".md", ".toml", ".yaml"}]
    files = [p for p in files if root / "tests" / "data" not in p.parents]
    _assert_nowhere(UNFINISHED, files, root)


def test_no_registry_host_is_named(tracked_files: list[Path], root: Path) -> None:
    _assert_nowhere(REGISTRY_HOST, tracked_files, root)


def test_no_path_of_a_machine_is_named(tracked_files: list[Path], root: Path) -> None:
    _assert_nowhere(MACHINE_PATH, tracked_files, root)


def test_no_lock_file(tracked_files: list[Path]) -> None:
    assert [path for path in tracked_files if path.name == "uv.lock"] == []


def test_errors_for_users_come_with_a_remedy(package_files: dict[str, Path]) -> None:
    bare = [
        f"{name}:{call.lineno}"
        for name, path in package_files.items()
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in {"UsageError", "RunError"}
        if len(call.args) + len(call.keywords) < 3
    ]
    assert not bare, "\n".join(bare)


def test_everything_public_has_a_docstring(package_files: dict[str, Path]) -> None:
    missing = []
    for name, path in package_files.items():
        tree = ast.parse(path.read_text())
        if ast.get_docstring(tree) is None:
            missing.append(name)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                public = not node.name.startswith("_") and not _is_overload(node)
                if public and ast.get_docstring(node) is None:
                    missing.append(f"{name}.{node.name} (line {node.lineno})")
    assert not missing, "no docstring:\n" + "\n".join(missing)


def _is_overload(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    return any("overload" in ast.unparse(decorator) for decorator in node.decorator_list)


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (REGISTRY_HOST, "index-url = https://host.example/" + "simple"),
        (MACHINE_PATH, "see /" + "work/main/x.py"),
        (MACHINE_PATH, "/" + "root/.cache"),
        (UNFINISHED, "# TO" + "DO: later"),
    ],
)
def test_the_patterns_find_what_they_are_for(pattern: re.Pattern[str], line: str) -> None:
    assert pattern.search(line)


@pytest.mark.parametrize("line", ["framework/data", "a/home", "./work/x", "https://x.y/root/z"])
def test_relative_paths_are_no_machine_paths(line: str) -> None:
    assert not MACHINE_PATH.search(line)
