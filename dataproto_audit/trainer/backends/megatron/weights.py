"""Names and pieces: what of each Hugging Face weight a Megatron parameter holds on this rank.

One table serves loading, export, gradients and checksums: every parameter is a few views of
Hugging Face tensors, each with its place. Query, key and value are interleaved by group in
``linear_qkv`` (a group's queries, its key, its value); gate and up lie one after the other in each
rank's ``linear_fc1``; the vocabulary is padded at its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dataproto_audit.trainer.backends.base import VALUE_HEAD
from dataproto_audit.trainer.backends.megatron.sizes import head_dim, tied
from dataproto_audit.trainer.backends.shards import ShardSpec, dtype_name

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_VALUE_HEAD = {name.replace("score", "value_head", 1): name for name in VALUE_HEAD}
_WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
_COLUMNS = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}


@dataclass(frozen=True)
class Seat:
    """Where this rank sits: tensor-parallel ``rank`` of ``ranks``.

    ``copy``: a data- or context-parallel peer holds the same weights and is asked for them.
    """

    rank: int
    ranks: int
    copy: bool


Piece = tuple[str, Tensor, ShardSpec]


def pieces(
    name: str, tensor: Tensor, *, first_layer: int, model: Mapping[str, Any], seat: Seat
) -> Iterator[Piece]:
    """Hugging Face name, view and place of each part of the parameter ``name`` of a chunk.

    ``tensor`` is the parameter or anything of its shape; ``first_layer`` the position of the
    chunk's layer 0 in the model.
    """
    cut = _Cut(tensor, seat, model)
    if name == "embedding.word_embeddings.weight":
        yield cut.vocabulary(EMBEDDING)
    elif name == "output_layer.weight":
        # A tied last stage holds a copy, whose gradient is summed with the embedding's.
        yield cut.vocabulary(EMBEDDING if tied(model) else HEAD, copy=tied(model))
    elif name in _VALUE_HEAD:
        yield cut.whole(_VALUE_HEAD[name])
    elif name == "decoder.final_layernorm.weight":
        yield cut.whole("model.norm.weight")
    else:
        _, _, layer, rest = name.split(".", 3)
        prefix = f"model.layers.{int(layer) + first_layer}."
        yield from _of_layer(cut, prefix, rest)


def _of_layer(cut: _Cut, prefix: str, rest: str) -> Iterator[Piece]:
    if rest in _WHOLE:
        yield cut.whole(prefix + _WHOLE[rest])
    elif rest in _COLUMNS:
        yield cut.columns(prefix + _COLUMNS[rest])
    elif rest.startswith("self_attention.linear_qkv."):
        yield from cut.query_key_value(prefix + "self_attn.", rest.rpartition(".")[2])
    elif rest == "mlp.linear_fc1.weight":
        half = cut.tensor.shape[0] // 2
        yield cut.rows(prefix + "mlp.gate_proj.weight", cut.tensor[:half])
        yield cut.rows(prefix + "mlp.up_proj.weight", cut.tensor[half:])
    else:
        raise AssertionError(f"an unknown parameter {rest}")


class _Cut:
    """The ways a tensor is cut over tensor-parallel ranks."""

    def __init__(self, tensor: Tensor, seat: Seat, model: Mapping[str, Any]) -> None:
        self.tensor, self._seat, self._model = tensor, seat, model
        self._dtype = dtype_name(tensor.dtype)

    def whole(self, name: str) -> Piece:
        copy = self._seat.copy or self._seat.rank > 0
        return name, self.tensor, ShardSpec(tuple(self.tensor.shape), self._dtype, copy=copy)

    def rows(self, name: str, view: Tensor) -> Piece:
        """A run of rows, as many on each rank; ``view`` may hold them in groups."""
        trailing = tuple(self.tensor.shape[1:])
        count = view.numel() // (self.tensor[0].numel() if trailing else 1)
        shape = (count * self._seat.ranks, *trailing)
        start = count * self._seat.rank
        return name, view, ShardSpec(shape, self._dtype, start, copy=self._seat.copy)

    def columns(self, name: str) -> Piece:
        rows, count = self.tensor.shape
        shape, start = (rows, count * self._seat.ranks), count * self._seat.rank
        spec = ShardSpec(shape, self._dtype, start, dim=1, copy=self._seat.copy)
        return name, self.tensor, spec

    def vocabulary(self, name: str, *, copy: bool = False) -> Piece:
        """Rows of the vocabulary without the padding at its end."""
        size, count = int(self._model["vocab_size"]), self.tensor.shape[0]
        start = min(count * self._seat.rank, size)
        view = self.tensor[: min(count, size - start)]
        shape = (size, *self.tensor.shape[1:])
        return name, view, ShardSpec(shape, self._dtype, start, copy=copy or self._seat.copy)

    def query_key_value(self, prefix: str, kind: str) -> Iterator[Piece]:
        model, size = self._model, head_dim(self._model)
        heads = int(model["num_attention_heads"])
        groups = int(model.get("num_key_value_heads") or heads)
        queries = heads // groups * size
        grouped = self.tensor.view(
            groups // self._seat.ranks, queries + 2 * size, *self.tensor.shape[1:]
        )
        at = 0
        for letter, rows in (("q", queries), ("k", size), ("v", size)):
            yield self.rows(f"{prefix}{letter}_proj.{kind}", grouped[:, at : at + rows])
            at += rows
