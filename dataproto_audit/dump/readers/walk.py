"""Which files of a folder are batches, told without reading them whole.

Folders of projects hold much else: environments, models, checkpoints, run folders of ours. What a
name or the first bytes do not show to be a batch is passed over; a file that is named itself is
always read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from dataproto_audit.dump.portable import SUFFIX, is_ours

DATA = frozenset({".pkl", ".pickle", ".pt", ".pth", ".dp", ".jsonl", ".gz", ".parquet"})
OTHER = frozenset(
    {".txt", ".md", ".log", ".yaml", ".yml", ".toml", ".py", ".json", ".safetensors", ".bin"}
)
FOREIGN = frozenset({"__pycache__", "node_modules", "site-packages"})
_BEGINS = re.compile(rb"\x80[\x02-\x05]|PAR1|\x1f\x8b")
_ARCHIVE = b"PK\x03\x04"


def data_files(root: Path) -> list[Path]:
    """Files under ``root`` that batches may be in, by path. Links to folders are not followed."""
    return sorted(file for file in _walk(root) if _is_data(file))


def is_run_folder(folder: Path) -> bool:
    """True for a folder that a run of ours wrote: tables, and no batches."""
    names = ("config.yaml", "environment.json", "summary.json")
    return (folder / "tables").is_dir() and any((folder / name).is_file() for name in names)


def _walk(root: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(root):
        here = Path(place)
        folders[:] = [name for name in folders if not _foreign(here / name)]
        yield from (here / name for name in files)


def _foreign(folder: Path) -> bool:
    hidden = folder.name.startswith(".") or folder.name in FOREIGN
    return hidden or (folder / "pyvenv.cfg").is_file() or is_run_folder(folder)


def _is_data(path: Path) -> bool:
    if path.suffix == SUFFIX:  # weights of models are no batches, unless a JSON of ours says so
        return is_ours(path)
    if path.name.startswith((".", "stages.jsonl")) or path.suffix in OTHER or not path.is_file():
        return False
    if path.suffix in DATA:
        return True
    try:
        with path.open("rb") as file:
            begin = file.read(4)
    except OSError:  # not to be opened, and no name of a batch either
        return False
    return bool(_BEGINS.match(begin)) or (begin == _ARCHIVE and not path.suffix)
