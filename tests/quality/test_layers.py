"""Imports go downward only. The layers are those of the design; every import counts, lazy or not.

Not covered: imports by name at run time (``importlib.import_module``).
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "dataproto_audit"

# Lowest first. Inside DATA and ENTRY modules may import each other; elsewhere only within one name.
DATA = (
    "catalogue", "codes", "findings", "reasons", "_protocol", "protocol", "batch", "forms",
    "storage", "fingerprint", "narrow", "fast", "policy", "atomic", "progress",
)  # fmt: skip
ENTRY = ("cli", "commands", "pytest_plugin", "verl_plugin", "__main__", "__init__")
LAYERS: tuple[tuple[str, ...], ...] = (
    DATA,
    ("dump",),
    ("reference", "contracts"),
    ("probes", "render", "verdicts"),
    ("auditor",),
    ("checker",),
    ("integrations", "trainer", "replay", "testing"),
    ("doctor",),
    ENTRY,
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

# Downward, and still not allowed: the second must stay an independent judge of the first.
INDEPENDENT = (
    ("trainer", "probes"),
    ("trainer", "reference"),
    ("testing.faults", "probes"),
    ("testing.faults", "contracts"),
)

ENGINES = {"ray", "vllm", "megatron", "verl", "transformers"}
REFERENCE_MAY_USE = {"torch", "numpy", "jaxtyping", "beartype"}


@dataclass(frozen=True)
class Import:
    """One imported name: dotted and absolute, where it stands, and when it is executed."""

    name: str
    line: int
    when: str  # "import", "call" (inside a function) or "types" (under TYPE_CHECKING)

    @property
    def root(self) -> str:
        """The top-level package."""
        return self.name.partition(".")[0]


def _imports(source: str, module: str, modules: set[str], *, is_package: bool) -> Iterator[Import]:
    """All imports of ``module``; ``from x import y`` gives ``x.y`` where that is a module."""

    def visit(node: ast.AST, when: str) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, when)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, is_package=is_package)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Import(full if full in modules else base, node.lineno, when)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            when = "call" if when == "import" else when
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from visit(child, "types")
            for child in node.orelse:
                yield from visit(child, when)
            return
        for child in ast.iter_child_nodes(node):
            yield from visit(child, when)

    yield from visit(ast.parse(source), "import")


def _absolute(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _layer_name(module: str) -> str:
    """``probes`` for ``dataproto_audit.probes.masks``; ``__init__`` for the package itself.

    ``_protocol`` is the private half of ``protocol`` and belongs to its layer.
    """
    name = module.split(".")[1] if "." in module else "__init__"
    return name if name.startswith("__") else name.removeprefix("_")


def _under(module: str, prefix: str) -> bool:
    return f"{module}.".startswith(f"{PACKAGE}.{prefix}.")


def _all_imports(package_files: dict[str, Path]) -> Iterator[tuple[str, Import]]:
    modules = set(package_files)
    for module, path in package_files.items():
        is_package = path.name == "__init__.py"
        for found in _imports(path.read_text(), module, modules, is_package=is_package):
            yield module, found


def _may_import(importer: str, imported: str) -> bool:
    a, b = _layer_name(importer), _layer_name(imported)
    if any(_under(importer, x) and _under(imported, y) for x, y in INDEPENDENT):
        return False
    if a == b or any(a in free and b in free for free in (DATA, ENTRY)):
        return True
    # A part without a layer may neither import nor be imported until it has one.
    return a in LEVEL and b in LEVEL and LEVEL[a] > LEVEL[b]


def _assert_none(wrong: Iterable[tuple[str, Import]]) -> None:
    lines = dict.fromkeys(f"{module}:{found.line} imports {found.name}" for module, found in wrong)
    assert not lines, "\n".join(lines)


def test_every_module_has_a_layer(package_files: dict[str, Path]) -> None:
    unknown = {_layer_name(module) for module in package_files} - set(LEVEL) - {"configs"}
    assert not unknown, f"give {sorted(unknown)} a layer in LAYERS"


def test_imports_go_downward_only(package_files: dict[str, Path]) -> None:
    _assert_none(
        (module, found)
        for module, found in _all_imports(package_files)
        if found.root == PACKAGE and not _may_import(module, found.name)
    )


def test_data_types_know_no_engine(package_files: dict[str, Path]) -> None:
    _assert_none(
        (module, found)
        for module, found in _all_imports(package_files)
        if _layer_name(module) in DATA
        if found.root in ENGINES or f"{found.name}.".startswith("torch.distributed.")
    )


def test_the_core_imports_engines_only_when_called(package_files: dict[str, Path]) -> None:
    _assert_none(
        (module, found)
        for module, found in _all_imports(package_files)
        if _layer_name(module) not in {"trainer", "integrations"}
        if found.root in ENGINES and found.when == "import"
    )


def test_the_reference_stands_alone(package_files: dict[str, Path]) -> None:
    def allowed(found: Import) -> bool:
        if found.root == "transformers":  # the forward pass of a recomputation
            return found.when != "import"
        if found.root == PACKAGE:
            return _under(found.name, "reference")
        return found.root in REFERENCE_MAY_USE or found.root in sys.stdlib_module_names

    _assert_none(
        (module, found)
        for module, found in _all_imports(package_files)
        if _under(module, "reference") and not allowed(found)
    )


def test_enforced_annotations_are_not_postponed(package_files: dict[str, Path]) -> None:
    """jaxtyping silently skips annotations that are strings."""
    postponed = []
    for module, path in package_files.items():
        source = path.read_text()
        tree = ast.parse(source)
        enforces = any(isinstance(n, ast.Name) and n.id == "jaxtyped" for n in ast.walk(tree))
        future = any(isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in tree.body)
        if future and (enforces or _under(module, "contracts")):
            postponed.append(module)
    assert postponed == []


def test_the_walker_sees_every_kind_of_import() -> None:
    source = """
import os, dataproto_audit.probes.masks
from dataproto_audit import auditor, check
from . import fsdp
from ..loop import step
if TYPE_CHECKING:
    from dataproto_audit.render import html
def later():
    from ray import get
"""
    modules = {f"{PACKAGE}.{m}" for m in ("auditor", "trainer.backends.fsdp", "render.html")}
    found = _imports(source, f"{PACKAGE}.trainer.backends.base", modules, is_package=False)
    assert [(i.name.removeprefix(f"{PACKAGE}."), i.when) for i in found] == [
        ("os", "import"),
        ("probes.masks", "import"),
        ("auditor", "import"),
        (PACKAGE, "import"),
        ("trainer.backends.fsdp", "import"),
        ("trainer.loop", "import"),
        ("render.html", "types"),
        ("ray", "call"),
    ]


def test_the_rules_refuse_what_they_are_for() -> None:
    def may(importer: str, imported: str) -> bool:
        return _may_import(f"{PACKAGE}.{importer}", f"{PACKAGE}.{imported}")

    assert may("trainer.loop", "auditor")
    assert may("batch", "protocol")
    assert may("trainer.loop", "trainer.algorithms.grpo")
    assert not may("trainer.algorithms.grpo", "reference.advantages")
    assert not may("reference.advantages", "trainer.algorithms.grpo")
    assert not may("replay.bisect", "testing.faults")
    assert not may("testing.faults", "contracts.fields")
    assert not may("probes.masks", "auditor")
    assert not may("contracts.check", "reference.masks")
    assert not _may_import(f"{PACKAGE}.probes.masks", PACKAGE)
