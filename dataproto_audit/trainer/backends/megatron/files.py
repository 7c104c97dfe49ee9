"""Weights of a model folder one at a time, so that no rank holds the whole model."""

from __future__ import annotations

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


@contextmanager
def open_weights(folder: Path) -> Iterator[Weights]:
    """A reader of the folder's :func:`.weight_files`: of safetensors, or of torch's ``.bin``, which
    are read whole, without running code. Raises DPA852."""
    with ExitStack() as stack:
        readers: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        for file in weight_files(folder):
            if file.suffix != ".safetensors":
                tensors |= _load(folder, file)
                continue
            try:
                reader = stack.enter_context(safe_open(str(file), framework="pt"))
            except (OSError, SafetensorError) as error:
                raise _lacks(folder, str(error)) from error
            readers |= dict.fromkeys(reader.keys(), reader)

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
