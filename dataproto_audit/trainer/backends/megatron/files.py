"""Weights of a model folder one at a time, so that no rank holds the whole model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.weight_files import weight_files


class Weights(Protocol):
    """Whole tensors by their Hugging Face names."""

    def __call__(self, name: str, *, shape: tuple[int, ...] | None = None) -> Tensor:
        """The tensor called ``name``. If there is none: zeros of ``shape``, or DPA852 without."""
        ...


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed ``config.json``; raises DPA852."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _lacks(folder, f"config.json cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise _lacks(folder, "config.json holds no object")
    return config


@contextmanager
def open_weights(folder: Path) -> Iterator[Weights]:
    """A reader of safetensors, or of ``pytorch_model*.bin`` (read whole, without running code)."""
    with ExitStack() as stack:
        readers: dict[str, Any] = {}
        try:
            for file in weight_files(folder):
                reader = stack.enter_context(safe_open(str(file), framework="pt"))
                readers |= dict.fromkeys(reader.keys(), reader)
        except (OSError, SafetensorError) as error:
            raise _lacks(folder, str(error)) from error
        tensors: dict[str, Tensor] = {}
        if not readers:
            for file in sorted(folder.glob("pytorch_model*.bin")):
                tensors |= _load(folder, file)

        def read(name: str, *, shape: tuple[int, ...] | None = None) -> Tensor:
            if name in tensors:
                return tensors[name]
            if name not in readers:
                if shape is not None:
                    return torch.zeros(shape)
                raise _lacks(folder, f"there is no weight {name}")
            tensor: Tensor = readers[name].get_tensor(name)
            return tensor

        yield read


def _load(folder: Path, file: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, UnpicklingError) as error:
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise _lacks(folder, f"{file.name} cannot be read ({why.rstrip('.')})") from error
    if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
        raise _lacks(folder, f"{file.name} holds no weights by name")
    return found


def _lacks(folder: Path, why: str) -> UsageError:
    return UsageError("DPA852", f"{folder}: {why}.", "Save the model there with save_pretrained.")
