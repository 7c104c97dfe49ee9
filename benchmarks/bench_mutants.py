"""How many seeded changes of the checks their tests notice: ``python benchmarks/bench_mutants.py``.

Draws ``--mutants`` places in ``contracts/``, ``probes/`` and ``reference/`` at which cosmic-ray
knows a change of one operator, number or condition, makes one change at a time in a copy of the
tree, and runs the tests of that module and, if those pass, of its layer. Prints the survivors and
the share that was noticed with its 95 % Wilson interval. The same seed draws the same mutants of
the same sources. Left out are changes that only touch annotations, decorators that register (their
loss shows at import) and ``TYPE_CHECKING``.

Needs ``pip install cosmic-ray`` (extra ``dev``). Some 5 s of CPU for a mutant that its own tests
notice, minutes for one that survives.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import pytest
from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("contracts", "probes", "reference")
LEFT_OUT = ("RemoveDecorator", "NoOp", "VariableReplacer", "VariableInserter")
LAYER_TESTS = {
    "contracts": ("tests/contracts", "tests/test_auditor.py"),
    "probes": ("tests/probes", "tests/testing/test_cases.py"),
    "reference": ("tests/reference", "tests/probes"),
}
QUICK = "not (engine or verl or verl_wheel or slow)"
TIMEOUT_S = 600
# Each run is a fork of a process that has libraries imported, none that pytest would rewrite.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["numpy", "torch", "tensordict"])


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
        if source(mutant) is not None:
            drawn.append(mutant)
        if len(drawn) == count:
            break
    return drawn


def own_tests(mutant: Mutant, root: Path) -> list[str]:
    """The test files that are named after the module."""
    path = Path(mutant.module)
    folder = root / "tests" / path.parent.name
    found = [folder / f"test_{path.stem}.py", *folder.glob(f"test_{path.stem}_*.py")]
    return [str(file.relative_to(root)) for file in found if file.exists()]


def fate(mutant: Mutant, root: Path, *, own_only: bool = False) -> str:
    """``killed``, ``killed by the layer``, ``timeout`` or ``survived``."""
    changed, place = source(mutant, root), root / mutant.module
    assert changed is not None
    original = place.read_text()
    place.write_text(changed)
    try:
        own = own_tests(mutant, root)
        layer = LAYER_TESTS[place.parent.name]
        rounds = [(own, "killed"), (layer, "killed by the layer")]
        for tests, verdict in rounds[:1] if own_only else rounds:
            if tests and (code := run(tests, root)) != 0:
                return "timeout" if code is None else verdict
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
    parser.add_argument(
        "--own-only", action="store_true",
        help="only the tests named after the module: a lower bound, in a fraction of the time",
    )  # fmt: skip
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
        whole = sorted({test for mutant in drawn for test in own_tests(mutant, root)})
        if run(whole, root) != 0:
            raise SystemExit("The tests fail, or do not end, before anything is changed.")

        def one(mutant: Mutant) -> str:
            root = free.get()
            try:
                return fate(mutant, root, own_only=options.own_only)
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
    print(f"  {dict(itertools.chain(fates.items()))}")


if __name__ == "__main__":
    main()
