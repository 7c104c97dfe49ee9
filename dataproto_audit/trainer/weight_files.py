"""A model folder's weights held against its ``config.json``, before anything is loaded.

Names and shapes come from the headers of safetensors files, so this costs milliseconds and imports
neither torch nor transformers. Not covered: what is in ``pytorch_model*.bin`` (a rank that loads it
names what is missing), models of other types than :data:`FAMILIES`, quantized ones, and a file that
``config.json`` names as its ``transformers_weights``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends.megatron.sizes import head_dim, tied
from dataproto_audit.trainer.model_config import FAMILIES, REMEDY, load_json

NAMES = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""Where transformers looks for a model's weights, in its order: one file, or an index of several.
Files by other names are none of the model's."""
LOOKED_FOR = tuple(name for names in NAMES for name in names)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHOWN = 4
SUFFIXES = (".safetensors", ".bin")
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
          "num_attention_heads")  # fmt: skip
_BLOCK = 1 << 22

Shape = tuple[int, ...]


class Stored(NamedTuple):
    """Where a tensor lies: ``begin`` and ``end`` are bytes of ``file``."""

    file: Path
    dtype: str
    shape: Shape
    begin: int
    end: int


def weight_files(folder: Path) -> list[Path]:
    """The files that make up the model, those that transformers would load: all safetensors, or
    all of torch's ``.bin``. DPA852 where there are none, or an index names files not there."""
    for single, index in NAMES:
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            return [folder / name for name in shards_of(folder / index)]
    others = sorted(file.name for file in folder.iterdir() if file.suffix in SUFFIXES)
    raise UsageError(
        "DPA852",
        f"{folder} holds no weights under a name that is looked for ({', '.join(LOOKED_FOR)})"
        + (f"; there are {_few(others)}." if others else "."),
        REMEDY,
    )


def shards_of(index: Path) -> list[str]:
    """Files that an index names; DPA852 for one that is no index, or names files not there."""
    try:
        names = sorted(set(load_json(index)["weight_map"].values()))
        gone = [name for name in names if not (index.parent / name).is_file()]
    except (ValueError, KeyError, AttributeError, TypeError):
        raise UsageError("DPA852", f"{index}: no readable index of weights.", REMEDY) from None
    if gone or not names:
        what = f"lists files that are missing: {_few(gone)}" if gone else "lists no file"
        raise UsageError("DPA852", f"{index} {what}.", REMEDY)
    return names


def check_weights(folder: Path, config: Mapping[str, Any], *, exact: bool = False) -> None:
    """Raise UsageError DPA852 for weights that are not there, damaged, or that ``config`` does not
    describe.

    ``config`` is what :func:`.model_config.read_config` gave. ``exact``: names must be
    those of one (Megatron's reader takes them as they are), while transformers also loads a folder
    whose names lack the prefix ``model.``.
    """
    stored = _stored(folder)
    if not stored:
        return
    if not exact and "embed_tokens.weight" in stored:
        stored = {f"model.{name}": where for name, where in stored.items()}
    wanted = dict(_expected(config))
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise UsageError(
            "DPA852",
            f"{folder} holds no {_few(missing)}, which its config.json asks for: training would "
            "begin from random numbers there.",
            REMEDY,
        )
    other = [
        f"{name} {stored[name].shape} instead of {shape}"
        for name, shape in wanted.items()
        if shape is not None and stored[name].shape != shape
    ]
    if other:
        raise UsageError(
            "DPA852", f"{folder}: shapes are not those of its config.json: {_few(other)}.", REMEDY
        )
    both = tied(config) and EMBEDDING in stored and HEAD in stored
    if both and not _same(stored[EMBEDDING], stored[HEAD]):
        raise UsageError(
            "DPA852",
            f"{folder}: config.json says tie_word_embeddings, but {HEAD} differs from "
            f"{EMBEDDING}: one engine would train two matrices, the other one.",
            "Set tie_word_embeddings to false in config.json, or take the weight out.",
        )


def _stored(folder: Path) -> dict[str, Stored]:
    """Every tensor of the folder's safetensors files by name, from headers checked by the library
    that reads them."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, Stored] = {}
    for file in weight_files(folder):
        if file.suffix != ".safetensors":
            continue
        try:
            with safe_open(file, framework="np"):
                pass
            header, start = _header(file)
        except (SafetensorError, OSError, ValueError) as error:
            raise UsageError(
                "DPA852", f"{file}: no readable safetensors file ({error}).", REMEDY
            ) from None
        if not header:
            raise UsageError("DPA852", f"{file}: there is no weight in it.", REMEDY)
        for name, entry in header.items():
            begin, end = (start + offset for offset in entry["data_offsets"])
            found[name] = Stored(file, entry["dtype"], tuple(entry["shape"]), begin, end)
    return found


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """Entries of a safetensors header, and where its data begin."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header: dict[str, Any] = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def _expected(config: Mapping[str, Any]) -> Iterator[tuple[str, Shape | None]]:
    """Weights of the model that ``config`` describes and their shapes, None where config.json
    leaves a size to transformers; nothing for types that are not known here."""
    kind = config.get("model_type")
    if kind not in FAMILIES or config.get("quantization_config"):
        return
    vocabulary, hidden, inner, layers, heads = (int(config[key]) for key in _SIZES)
    pairs, width = config.get("num_key_value_heads"), head_dim(config)
    query: int = heads * width
    value = None if pairs is None else int(pairs) * width
    own, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    yield EMBEDDING, (vocabulary, hidden)
    for layer in range(layers):
        name = f"model.layers.{layer}."
        attention, mlp = f"{name}self_attn.", f"{name}mlp."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{name}{norm}.weight", (hidden,)
        for part, rows in (("q_proj", query), ("k_proj", value), ("v_proj", value)):
            yield f"{attention}{part}.weight", None if rows is None else (rows, hidden)
            if kind == "qwen2" or own:
                yield f"{attention}{part}.bias", None if rows is None else (rows,)
        yield f"{attention}o_proj.weight", (hidden, query)
        if kind != "qwen2" and own:
            yield f"{attention}o_proj.bias", (hidden,)
        if kind == "qwen3":
            for part in ("q_norm", "k_norm"):
                yield f"{attention}{part}.weight", (width,)
        for part, shape in (("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden)),
                            ("down_proj", (hidden, inner))):  # fmt: skip
            yield f"{mlp}{part}.weight", shape
            if kind == "llama" and mlp_bias:
                yield f"{mlp}{part}.bias", shape[:1]
    yield "model.norm.weight", (hidden,)
    if not tied(config):
        yield HEAD, (vocabulary, hidden)


def _same(one: Stored, other: Stored) -> bool:
    """Whether two tensors hold the same bytes."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.begin)
        second.seek(other.begin)
        left = one.end - one.begin
        while left:
            size = min(left, _BLOCK)
            if first.read(size) != second.read(size):
                return False
            left -= size
    return True


def _few(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
