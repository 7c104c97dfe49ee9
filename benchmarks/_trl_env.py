"""The environment that TRL's side of ``bench_trl.py`` runs in: ``.venvs/trl``, made by uv.

It is apart from ``.venv``, because TRL wants the newest transformers. CUDA packages stay out: the
overrides of this repository ask for the CPU build of torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

REQUIREMENT = "trl>=1.16,<2"
"""The newest TRL of the line whose settings ``_trl_run.py`` speaks."""


def ensure(root: Path) -> Path:
    """The environment's python, made on the first call and whenever what it is made of changes.

    Raises FileNotFoundError without uv and subprocess.CalledProcessError if uv fails.
    """
    folder = root / ".venvs" / "trl"
    python, stamp = folder / "bin" / "python", folder / ".installed"
    overrides = root / "overrides-cpu.txt"
    made_of = f"{REQUIREMENT}\n{sys.version}\n{overrides.read_text(encoding='utf-8')}"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == made_of:
        return python
    uv = find_uv(root)
    print(f"making {folder.relative_to(root)} for {REQUIREMENT}", flush=True)
    subprocess.run(
        [uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder], check=True
    )
    into = ["--quiet", f"--python={python}", f"--overrides={overrides}"]
    subprocess.run([uv, "pip", "install", *into, *sources(), REQUIREMENT], check=True)
    stamp.write_text(made_of, encoding="utf-8")
    return python


def find_uv(root: Path) -> str:
    """uv of ``.venv``, of the running python, or of the PATH."""
    for folder in (root / ".venv" / "bin", Path(sys.executable).parent):
        if (folder / "uv").is_file():
            return str(folder / "uv")
    found = shutil.which("uv")
    if found is None:
        raise FileNotFoundError("uv is neither in .venv nor on the PATH; `make install` brings it")
    return found


def sources() -> list[str]:
    """Where uv looks for packages: pip's settings, and a local CPU build of torch if there is one.

    uv does not read pip's variables. Without a local build it is told to use PyTorch's own index.
    """
    folders = os.environ.get("PIP_FIND_LINKS", "").split()
    flags = [f"--find-links={folder}" for folder in folders]
    if index := os.environ.get("PIP_INDEX_URL"):
        flags.append(f"--default-index={index}")
    local = any(list(Path(folder).glob("torch-*+cpu*.whl")) for folder in folders)
    return flags if local else [*flags, "--torch-backend=cpu"]
