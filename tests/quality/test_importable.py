"""Every module imports on its own, and the data types stay light."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Names that must not come in with the data types. (torch and tensordict load parts of
# torch.distributed themselves; what counts is what the package adds to that.)
HEAVY = {"ray", "vllm", "megatron", "verl", "transformers", "pandas", "pandera", "pyarrow"}
LIGHT = tuple(
    f"dataproto_audit{suffix}"
    for suffix in ("", ".protocol", ".batch", ".findings", ".codes", ".verl_plugin")
)

# One process loads third parties once and forks: each module is the first of the package that its
# child imports, so that a circular import cannot hide behind the order of the others.
IMPORTER = """
import importlib, json, os, sys, traceback

def in_child(name):
    before = set(sys.modules)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(name)
            answer = {"added": sorted(set(sys.modules) - before)}
        except BaseException:
            answer = {"error": traceback.format_exc()[-4000:]}
        with os.fdopen(write, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer or '{"error": "the process died"}')

def load(names):
    for name in names.split():
        importlib.import_module(name)

given = json.load(sys.stdin)
load("torch numpy tensordict")
light = {name: in_child(name) for name in given["light"]}
load("jaxtyping beartype pandas pyarrow pandera.pandas typer rich omegaconf ray transformers")
load("megatron.core.optimizer megatron.core.models.gpt")
json.dump(light | {name: in_child(name) for name in given["others"]}, sys.stdout)
"""


@pytest.fixture(scope="module")
def imported(package_files: dict[str, Path], root: Path) -> dict[str, dict[str, Any]]:
    """For each module, imported by a fresh process: ``added`` modules, or the ``error``."""
    names = sorted(name for name in package_files if not name.endswith("__main__"))
    light = [name for name in names if name in LIGHT]
    given = {"light": light, "others": [name for name in names if name not in LIGHT]}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTER],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_every_module_imports_first(imported: dict[str, dict[str, Any]]) -> None:
    failed = {name: answer["error"] for name, answer in imported.items() if "error" in answer}
    assert not failed, "\n".join(f"{name}: {error}" for name, error in failed.items())


def test_the_data_types_are_light(imported: dict[str, dict[str, Any]]) -> None:
    heavy = [
        f"{name} pulls in {added}"
        for name, answer in imported.items()
        if name in LIGHT
        for added in answer.get("added", ())
        if added in HEAVY or f"{added}.".startswith("torch.distributed.")
    ]
    assert not heavy, "\n".join(heavy)
