"""A batch as two plain files: ``NAME.safetensors`` with the tensors, ``NAME.json`` with the rest.

The JSON holds the format's name and version, the kind of each tensor (``padded``, or ``jagged`` as
``name.values`` and ``name.offsets``), and non-tensor fields and meta entries as typed JSON
(:mod:`dataproto_audit.dump.trace_json`). A safetensors file without a JSON of ours is read, too:
its tensors are the fields. Opening either executes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load, save
from torch import Tensor

from dataproto_audit._protocol.safe.torch_values import jagged
from dataproto_audit.atomic import atomic_write_bytes
from dataproto_audit.codes import RunError, UsageError
from dataproto_audit.dump.trace_json import Decoder, Encoder
from dataproto_audit.storage import flat_parts, listed

FORMAT, SCHEMA = "dataproto_audit.batch", 1
SUFFIX = ".safetensors"
_HEADER = 8


def json_beside(path: Path) -> Path:
    """The JSON that belongs to a safetensors file."""
    return path.with_suffix(".json")


def write_portable(path: str | PathLike[str], batch: Mapping[str, Any]) -> tuple[str, ...]:
    """Write a batch in its plain form (keys ``batch``, ``non_tensor_batch``, ``meta_info``).

    Returns the names of classes whose objects could not be stored. Raises ``RunError``
    (``DPA802``) where the disk refuses.
    """
    place, encode = Path(path), Encoder()
    tensors: dict[str, Tensor] = {}
    fields: dict[str, Any] = {}
    for name, tensor in batch["batch"].items():
        fields[name] = {"kind": "jagged" if tensor.is_nested else "padded"}
        if tensor.is_nested:
            tensors[f"{name}.values"], tensors[f"{name}.offsets"] = flat_parts(tensor)
        else:
            tensors[name] = tensor.detach()
    arrays = {n: encode(listed(a)) for n, a in batch["non_tensor_batch"].items()}
    said = {
        "format": FORMAT, "schema": SCHEMA, "fields": fields, "non_tensor_batch": arrays,
        "meta_info": encode(dict(batch["meta_info"])), "opaque": sorted(encode.opaque),
    }  # fmt: skip
    tensors.update({f"json.{name}": tensor for name, tensor in encode.tensors.items()})
    dense = {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}
    try:
        atomic_write_bytes(place, save(dense))
        atomic_write_bytes(json_beside(place), json.dumps(said).encode())
    except OSError as error:
        raise RunError(
            "DPA802", f"{place} cannot be written: {error.strerror}.", "Name another place."
        ) from error
    return tuple(said["opaque"])


def is_safetensors(data: bytes) -> bool:
    """Whether the bytes begin as a safetensors file does: a length, then a JSON object."""
    if len(data) < _HEADER + 2:
        return False
    size = int.from_bytes(data[:_HEADER], "little")
    return data[_HEADER : _HEADER + 1] == b"{" and size <= len(data) - _HEADER


def is_ours(path: Path) -> bool:
    """Whether a JSON beside a safetensors file says that it is a batch."""
    try:
        with json_beside(path).open("rb") as file:
            return FORMAT.encode() in file.read(200)
    except OSError:  # none there
        return False


def read_portable(path: Path, data: bytes) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The plain form of the batch whose tensors are ``data``, and the classes it only names.

    Raises ``ValueError`` and what the safetensors library raises for broken bytes,
    :class:`UsageError` (``DPA821``) for a newer version.
    """
    tensors = dict(load(data))
    beside = json_beside(path)
    if not beside.is_file():
        return {"batch": tensors, "non_tensor_batch": {}, "meta_info": {}}, ()
    said = json.loads(beside.read_bytes())
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        return {"batch": tensors, "non_tensor_batch": {}, "meta_info": {}}, ()
    if type(said.get("schema")) is not int or said["schema"] > SCHEMA:
        raise UsageError(
            "DPA821", f"{beside} is of version {said.get('schema')!r}, read is up to {SCHEMA}.",
            "Update dataproto-audit.",
        )  # fmt: skip
    hoisted = {n.removeprefix("json."): t for n, t in tensors.items() if n.startswith("json.")}
    decode = Decoder(hoisted)
    found: dict[str, Tensor] = {}
    for name, how in dict(said["fields"]).items():
        if how["kind"] == "jagged":
            values, offsets = tensors[f"{name}.values"], tensors[f"{name}.offsets"]
            found[name] = jagged(values, offsets, None)
        else:
            found[name] = tensors[name]
    arrays = {name: decode(value) for name, value in dict(said["non_tensor_batch"]).items()}
    if not all(isinstance(array, np.ndarray) and array.ndim for array in arrays.values()):
        raise ValueError("a non-tensor field that is no column")
    meta = decode(said["meta_info"])
    batch = {"batch": found, "non_tensor_batch": arrays, "meta_info": dict(meta)}
    return batch, tuple(map(str, said.get("opaque", ())))
