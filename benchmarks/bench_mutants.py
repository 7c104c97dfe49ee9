"""How many seeded changes of the checks their tests notice: ``python benchmarks/bench_mutants.py``.

Draws ``--mutants`` places in ``contracts/``, ``probes/`` and ``reference/`` at which cosmic-ray
knows a change of one operator, number or condition, and makes one change at a time in a copy of the
tree. The tests of the three packages run once unchanged, to learn which of them execute which line;
of a changed line those run until one fails: ``--tests`` of them, the module's own first, and then
the others. A line that runs at import is tried on ``--tests`` tests that execute the module. Prints
the survivors and the share that was noticed with its 95 % Wilson interval. The same seed draws the
same mutants of the same sources. Left out are changes that only touch annotations, decorators that
register (their loss shows at import) and ``TYPE_CHECKING``.

Needs extra ``dev``. A quarter of an hour for the unchanged tests, then seconds for each mutant.
"""

from __future__ import annotations

import argparse
import ast
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

import pytest
from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from coverage import CoverageData

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("contracts", "probes", "reference")
LEFT_OUT = ("RemoveDecorator", "NoOp", "VariableReplacer", "VariableInserter")
TESTS = ("tests/contracts", "tests/probes", "tests/reference", "tests/checker", "tests/testing",
         "tests/test_auditor.py", "tests/test_auditor_properties.py", "tests/test_fast.py",
         "tests/test_narrow.py")  # fmt: skip
QUICK = "not (engine or verl or verl_wheel or slow)"
TIMEOUT_S = 300
# Each run is a fork of a process that has libraries imported, none that pytest would rewrite.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["numpy", "torch", "tensordict", "pandas", "pyarrow"])


@dataclass(frozen=True)
class Mutant:
    """One change: ``occurrence`` of an operator of cosmic-ray in a module of the package."""

    module: str
    line: int
    operator: str
    occurrence: int

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.operator.rpartition('/')[2]}"


def places(modules: Sequence[Path]) -> Iterator[list[Mutant]]:
    """The mutants of each place: all replacements of one operator, number or condition."""
    families: dict[str, list[str]] = {}
    for name in sorted(operator_names()):
        if not get_operator(name).arguments() and not any(word in name for word in LEFT_OUT):
            replaces = name.rpartition("/")[2].startswith("Replace") and name.count("_") > 1
            families.setdefault(name.rpartition("_")[0] if replaces else name, []).append(name)
    for path in modules:
        module, nodes = str(path.relative_to(ROOT)), list(ast_nodes(get_ast_from_path(path)))
        for names in families.values():  # operators of one family replace the same thing
            operator = get_operator(names[0])()
            spots = (spot for node in nodes for spot in operator.mutation_positions(node))
            for occurrence, (start, _) in enumerate(spots):
                yield [Mutant(module, start[0], name, occurrence) for name in names]


def source(mutant: Mutant, root: Path = ROOT) -> str | None:
    """The changed module; None where it means the same, or is no Python any more."""
    before = (root / mutant.module).read_text()
    after = mutate_code(before, get_operator(mutant.operator)(), mutant.occurrence)
    if after is None:
        return None
    try:
        same = _meaning(before) == _meaning(after)
    except SyntaxError:
        return None
    return None if same else after


def _meaning(text: str) -> str:
    """The module without its annotations."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(0)
    return ast.dump(tree)


def draw(count: int, seed: int) -> list[Mutant]:
    """``count`` mutants, each at a place of its own."""
    modules = [
        path for name in PACKAGES for path in sorted((ROOT / "dataproto_audit" / name).glob("*.py"))
    ]
    chance, drawn = random.Random(seed), []
    everywhere = list(places(modules))
    chance.shuffle(everywhere)
    for alternatives in everywhere:
        mutant = chance.choice(alternatives)
        changed = source(mutant)
        if changed is not None:
            drawn.append(replace(mutant, line=_first_line(mutant, changed)))
        if len(drawn) == count:
            break
    return drawn


def _first_line(mutant: Mutant, changed: str) -> int:
    """The line that is changed: not all replacements of one thing are counted alike."""
    before = (ROOT / mutant.module).read_text().splitlines()
    pairs = enumerate(zip(before, changed.splitlines(), strict=False), 1)
    return next((number for number, (old, new) in pairs if old != new), mutant.line)


def executed_by(root: Path) -> dict[str, dict[int, list[str]]]:
    """By module and line, the tests that execute it; all of them have to pass in ``root``."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", QUICK,
        *(f"--cov=dataproto_audit.{name}" for name in PACKAGES), "--cov-context=test",
        "--cov-report=", *TESTS,
    ]  # fmt: skip
    if subprocess.run(command, cwd=root, stdout=subprocess.DEVNULL, check=False).returncode:
        raise SystemExit("The tests fail before anything is changed.")
    data = CoverageData(str(root / ".coverage"))
    data.read()
    found: dict[str, dict[int, list[str]]] = {}
    for file in data.measured_files():
        lines = data.contexts_by_lineno(file).items()
        tests = {line: sorted({t.partition("|")[0] for t in by} - {""}) for line, by in lines}
        found[str(Path(file).relative_to(root))] = tests
    return found


def tests_of(
    mutant: Mutant, executed: dict[int, list[str]], root: Path, most: int
) -> list[list[str]]:
    """Tests that execute the statement: ``most`` of them, among them its module's, and the rest."""
    first, last = _statement(mutant, root)
    found = {test for line in range(first, last + 1) for test in executed.get(line, ())}
    at_import = not found
    if at_import:
        found = {test for tests in executed.values() for test in tests}
    own = f"/test_{Path(mutant.module).stem}"
    ordered = sorted(found, key=lambda test: (own not in test, test))
    others = ordered[most // 2 :]
    few = random.Random(0).sample(others, min(len(others), most - most // 2))
    rest = [] if at_import else [test for test in others if test not in set(few)]
    return [part for part in ([*ordered[: most // 2], *few], rest) if part]


def _statement(mutant: Mutant, root: Path) -> tuple[int, int]:
    """First and last line of the innermost statement, of one with a body its head."""
    best = (mutant.line, mutant.line)
    for node in ast.walk(ast.parse((root / mutant.module).read_text())):
        if isinstance(node, ast.stmt) and node.lineno <= mutant.line <= (node.end_lineno or 0):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if isinstance(body, list) else node.end_lineno
            if last is not None and mutant.line <= last:
                best = (node.lineno, last)
    return best


def fate(mutant: Mutant, rounds: Sequence[Sequence[str]], root: Path) -> str:
    """``killed``, ``timeout`` or ``survived``."""
    changed, place = source(mutant, root), root / mutant.module
    assert changed is not None
    original = place.read_text()
    place.write_text(changed)
    try:
        for tests in rounds:
            code = run(tests, root)
            if code != 0:
                return "timeout" if code is None else "killed"
        return "survived"
    finally:
        place.write_text(original)


def run(tests: Sequence[str], root: Path) -> int | None:
    """Exit status of pytest up to its first failure; None where it does not end."""
    process = SERVER.Process(target=_pytest, args=(tuple(tests), str(root)))
    process.start()
    process.join(TIMEOUT_S)
    if process.exitcode is None:
        process.kill()
        process.join()
        return None
    return process.exitcode


def _pytest(tests: Sequence[str], root: str) -> None:
    os.chdir(root)
    sys.path.insert(0, root)
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", QUICK]
    os._exit(int(pytest.main([*options, *tests])))  # threads of a changed loop must not hold it


def wilson(hits: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927)."""
    z, share = 1.96, hits / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    spread = z / (1 + z * z / total)
    spread *= (share * (1 - share) / total + z * z / (4 * total * total)) ** 0.5
    return middle - spread, middle + spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tests", type=int, default=60, help="most tests for one mutant")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}  # of all forks
    began, drawn = time.monotonic(), draw(options.mutants, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        free: SimpleQueue[Path] = SimpleQueue()
        for job in range(options.jobs):
            root = Path(folder) / str(job)
            for part in ("dataproto_audit", "tests", "docs", "pyproject.toml"):
                copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
                root.mkdir(exist_ok=True)
                copy(ROOT / part, root / part)
            free.put(root)
        executed = executed_by(root)

        def one(mutant: Mutant) -> str:
            root = free.get()
            try:
                rounds = tests_of(mutant, executed.get(mutant.module, {}), root, options.tests)
                return fate(mutant, rounds, root)
            finally:
                free.put(root)

        with ThreadPoolExecutor(options.jobs) as pool:
            fates: Counter[str] = Counter()
            by_package: Counter[tuple[str, bool]] = Counter()
            for done, (mutant, end) in enumerate(zip(drawn, pool.map(one, drawn), strict=True), 1):
                fates[end] += 1
                by_package[Path(mutant.module).parent.name, end != "survived"] += 1
                if end == "survived":
                    print(f"  survived: {mutant}", flush=True)
                if done % 50 == 0:
                    print(f"  {done} of {len(drawn)}: {dict(fates)}", flush=True)
    noticed = len(drawn) - fates["survived"]
    low, high = wilson(noticed, len(drawn))
    print(f"{noticed} of {len(drawn)} mutants noticed: {noticed / len(drawn):.1%} "
          f"({low:.1%} to {high:.1%}), seed {options.seed}, "
          f"{time.monotonic() - began:.0f} s with {options.jobs} jobs")  # fmt: skip
    for name in PACKAGES:
        killed, lived = by_package[name, True], by_package[name, False]
        print(f"  {name}: {killed} of {killed + lived}")
    print(f"  {dict(fates)}")


if __name__ == "__main__":
    main()
