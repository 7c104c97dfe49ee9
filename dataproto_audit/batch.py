"""One read-only view over every form a batch comes in.

``BatchView.of`` takes our or verl's ``DataProto``, a padded or jagged ``TensorDict``, or a plain
mapping with the keys ``batch``, ``non_tensor_batch`` and ``meta_info``. Contracts and probes read
the view only, so no check is written twice.

Layout of a padded row, P prompt columns and R response columns::

    prompts  0..0 x x x | responses  y y y 0..0        input_ids = prompts + responses

Jagged fields (nested tensors with one row length each) are padded on access to the same layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataproto_audit.codes import UsageError
from dataproto_audit.fingerprint import Hashes, row_hash

Layout = Literal["padded", "jagged"]
Array = NDArray[Any]

_PARTS = ("batch", "non_tensor_batch", "meta_info")

PROMPT_FIELDS = frozenset({"prompts"})
FULL_FIELDS = ("input_ids", "attention_mask", "position_ids")
RESPONSE_FIELDS = (
    "responses", "response_mask", "loss_mask", "rollout_log_probs", "old_log_probs",
    "ref_log_prob", "token_level_scores", "token_level_rewards", "rm_scores", "values",
    "advantages", "returns", "entropys", "update_log_probs", "update_entropys",
)  # fmt: skip
"""Fields with a response axis. Together they decide its width, so no broken one does alone."""
BLOCK_BYTES = 1 << 20
"""Row blocks are cut so that one field of a block is about this large and stays in cache."""


class BatchView:
    """Fields of one batch as arrays, with the sizes that the whole batch agrees on.

    ``tensors`` are as stored (padded ``[rows, ...]`` or nested), ``arrays`` are the non-tensor
    fields, ``meta`` is the meta entries. ``rows``, ``prompt`` and ``response`` are the sizes of
    the axes of the same name; a size that the batch does not determine is ``None``. ``untracked``
    tensors share memory with a numpy array, so torch cannot tell whether they were written.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        arrays: Mapping[str, Array],
        meta: Mapping[str, Any],
        *,
        untracked: Iterable[str] = (),
    ) -> None:
        self.tensors = dict(tensors)
        self.arrays = dict(arrays)
        self.meta = meta
        self.untracked = frozenset(untracked)
        self.fits_declaration: int | None = None
        """Number of declared fields when all of them were found to fit; None before that."""
        self._numpy: dict[str, Array] = {}
        self._hashes: dict[str, Hashes] = {}

    @classmethod
    def of(cls, batch: Any) -> BatchView:
        """View ``batch``; :class:`UsageError` when it is no form of batch, or holds no data."""
        if isinstance(batch, BatchView):
            return batch
        if batch is None:
            return cls({}, {}, {})
        if hasattr(batch, "non_tensor_batch") and hasattr(batch, "meta_info"):
            return cls._of_parts(batch.batch, batch.non_tensor_batch, batch.meta_info)
        if hasattr(batch, "batch_size") and hasattr(batch, "items"):  # a TensorDict
            return cls._of_parts(batch)
        if isinstance(batch, Mapping):
            whole = any(part in batch for part in _PARTS)
            return cls._of_parts(*map(batch.get, _PARTS)) if whole else cls._of_parts(batch)
        raise UsageError(
            "DPA857",
            f"cannot read a batch from {type(batch).__name__}.",
            "Pass a DataProto, a TensorDict, or a mapping with the key 'batch'.",
        )

    @classmethod
    def _of_parts(cls, fields: Any, objects: Any = None, meta: Any = None) -> BatchView:
        tensors: dict[str, Tensor] = {}
        arrays: dict[str, Array] = {}
        untracked = []
        for name, value in () if fields is None else fields.items():
            if isinstance(value, Tensor):
                if value.is_meta:
                    raise UsageError(
                        "DPA857", f"the field {name} has no data.", "Move it off the meta device."
                    )
                tensors[str(name)] = value
            elif isinstance(value, np.ndarray) and value.dtype.kind in "iufb":
                tensors[str(name)] = _shared(value)
                untracked.append(str(name))
            elif (array := _listed(value)) is not None:
                arrays[str(name)] = array
        for name, value in (objects or {}).items():
            array = _listed(value)
            if array is not None:
                arrays[str(name)] = array
        return cls(tensors, arrays, meta or {}, untracked=untracked)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors or name in self.arrays

    def has(self, name: str) -> bool:
        """True when the field is there or, for the attention mask, follows from row lengths."""
        return name in self or (name == "attention_mask" and self.attention is not None)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of all row fields, tensors first."""
        return (*self.tensors, *self.arrays)

    @cached_property
    def layout(self) -> Layout:
        """``jagged`` when any tensor field has row lengths of its own."""
        return "jagged" if any(t.is_nested for t in self.tensors.values()) else "padded"

    @cached_property
    def rows(self) -> int:
        """Number of rows: what most fields say, so that one broken field does not decide."""
        sizes = [t.size(0) for t in self.tensors.values() if t.dim()]
        return _most(sizes + [a.shape[0] for a in self.arrays.values() if a.ndim]) or 0

    @cached_property
    def response(self) -> int | None:
        """Width of the response axis; of a jagged batch, its longest row."""
        return _most([self._width(name) for name in RESPONSE_FIELDS if name in self.tensors])

    @cached_property
    def prompt(self) -> int | None:
        """Width of the prompt axis; of a jagged batch, its longest row."""
        own = [self._width("prompts")] if "prompts" in self.tensors else []
        if self.response is None or self.layout == "jagged":
            return _most(own)
        full = [self._width(name) for name in FULL_FIELDS if name in self.tensors]
        return _most([*own, *(w - self.response for w in full if w and w >= self.response)])

    @cached_property
    def empty(self) -> frozenset[str]:
        """Fields without a single value: no rows, or no columns."""
        fields = {name for name, tensor in self.tensors.items() if not tensor.numel()}
        return frozenset(fields.union(name for name, a in self.arrays.items() if not a.size))

    def _width(self, name: str) -> int | None:
        tensor = self.tensors[name]
        if tensor.is_nested:
            return int(self.lengths(name).max(initial=0))
        return int(tensor.shape[-1]) if tensor.dim() >= 2 else None

    def lengths(self, name: str) -> NDArray[np.int64]:
        """Row lengths of a jagged field, ``[rows]``."""
        tensor: Any = self.tensors[name]
        if _is_plain_jagged(tensor):
            lengths: NDArray[np.int64] = np.diff(tensor.offsets().cpu().numpy()).astype(np.int64)
            return lengths
        rows = _ragged_rows(tensor)
        return np.fromiter((row.shape[0] for row in rows), np.int64, len(rows))

    def numpy(self, name: str) -> Array:
        """The field as a padded numpy array, without a copy where the memory allows it."""
        found = self._numpy.get(name)
        if found is None:
            found = self._numpy[name] = self._as_numpy(name)
        return found

    def row_hashes(self, name: str) -> Hashes:
        """Fingerprint of each row of a tensor field (one that has an axis of rows)."""
        found = self._hashes.get(name)
        if found is None:
            found = self._hashes[name] = row_hash(np.atleast_1d(self.numpy(name)))
        return found

    def take_over(self, name: str, previous: BatchView) -> None:
        """Take over what ``previous`` computed of a tensor that is known to be unchanged."""
        self._hashes[name] = previous._hashes[name]
        if name in previous._numpy:
            self._numpy[name] = previous._numpy[name]

    def _as_numpy(self, name: str) -> Array:
        if name in self.arrays:
            return self.arrays[name]
        if name == "attention_mask" and name not in self.tensors and self.attention is not None:
            return self.attention
        tensor = self.tensors[name]
        return self._padded(name) if tensor.is_nested else _dense(tensor)

    def _padded(self, name: str) -> Array:
        """Lay a jagged field out as a padded one: prompt part left-, response part right-padded.

        Cells that do not fit the batch's widths are left out; that they are there is for the
        contract to say.
        """
        lengths, values = self.lengths(name), _jagged_values(self.tensors[name])
        prompt, response = self.prompt or 0, self.response or 0
        start, width = np.zeros_like(lengths), int(lengths.max(initial=0))
        if name in PROMPT_FIELDS:
            start, width = prompt - lengths, prompt
        elif name in RESPONSE_FIELDS:
            width = response
        elif name in FULL_FIELDS and "prompts" in self.tensors:
            left = self.lengths("prompts") if self.tensors["prompts"].is_nested else prompt
            start, width = start + prompt - left, prompt + response
        row = np.repeat(np.arange(len(lengths)), lengths)
        first = np.repeat(np.cumsum(lengths) - lengths, lengths)
        column = np.arange(len(row)) - first + np.repeat(start, lengths)
        fits = (column >= 0) & (column < width)
        out = np.zeros((len(lengths), width, *values.shape[1:]), values.dtype)
        out[row[fits], column[fits]] = values[fits]
        return out

    @cached_property
    def attention(self) -> Array | None:
        """Attention mask ``[rows, prompt + response]``; derived from row lengths when jagged."""
        if "attention_mask" in self.tensors:
            return self.numpy("attention_mask")
        sides = [self.tensors.get(name) for name in ("prompts", "responses")]
        if all(side is not None and side.is_nested for side in sides):
            prompt, response = self.prompt or 0, self.response or 0
            column = np.arange(prompt + response)[None]
            first = prompt - self.lengths("prompts")[:, None]
            last = prompt + self.lengths("responses")[:, None]
            return ((column >= first) & (column < last)).astype(np.int64)
        return None

    def blocks(self, rows: int | None = None) -> Iterator[Block]:
        """Padded row blocks that cover the batch once; ``rows`` of each, or cache-sized ones."""
        if rows is None:
            width = max(1, (self.prompt or 0) + (self.response or 0))
            rows = max(32, BLOCK_BYTES // (8 * width))
        for start in range(0, self.rows, rows):
            yield Block(self, slice(start, min(start + rows, self.rows)))


class Block:
    """A slice of rows of a view, with the masks that several statistics share."""

    def __init__(self, view: BatchView, rows: slice) -> None:
        self.view = view
        self.rows = rows

    def __getitem__(self, name: str) -> Array:
        out: Array = self.view.numpy(name)[self.rows]
        return out

    @cached_property
    def attention(self) -> Array:
        """Attention mask ``[block, prompt + response]``."""
        attention = self.view.attention
        if attention is None:
            raise KeyError("attention_mask")
        out: Array = attention[self.rows]
        return out

    @cached_property
    def attended(self) -> Array:
        """Attention as bool ``[block, prompt + response]``."""
        out: Array = self.attention != 0
        return out

    @cached_property
    def response_attention(self) -> Array:
        """Attention of the response part as bool ``[block, response]``."""
        out: Array = self.attended[:, self.view.prompt or 0 :]
        return out

    @cached_property
    def mask(self) -> Array:
        """Response mask as bool ``[block, response]``."""
        out: Array = self["response_mask"] != 0
        return out

    @cached_property
    def mask_differs(self) -> Array:
        """Where response mask and response attention differ, ``[block, response]``."""
        out: Array = self.mask != self.response_attention
        return out


def _most(sizes: Iterable[int | None]) -> int | None:
    """The most frequent size, of equally frequent ones the first; None without any."""
    counts: dict[int, int] = {}
    for size in sizes:
        if size is not None:
            counts[size] = counts.get(size, 0) + 1
    return max(counts, key=counts.__getitem__) if counts else None


def _is_plain_jagged(tensor: Any) -> bool:
    """True for nested tensors whose values lie row after row, ragged in axis 1."""
    plain = tensor.layout == torch.jagged and tensor.lengths() is None
    return bool(plain and getattr(tensor, "_ragged_idx", 1) == 1)


def _ragged_rows(tensor: Any) -> list[Tensor]:
    """The rows of a nested tensor of any kind, each with its ragged axis first."""
    axis = int(getattr(tensor, "_ragged_idx", 1)) - 1
    return [row.reshape(1) if row.dim() == 0 else row.movedim(axis, 0) for row in tensor.unbind()]


def _jagged_values(tensor: Any) -> Array:
    """The values of all rows one after another, ``[sum of lengths, ...]``."""
    if _is_plain_jagged(tensor):
        return _dense(tensor.values())
    rows = _ragged_rows(tensor)
    return _dense(torch.cat(rows)) if rows else np.zeros(0)


def _dense(tensor: Tensor) -> Array:
    """``tensor`` as numpy; kinds of number that numpy lacks (bf16, fp8) become float32."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    try:
        out: Array = tensor.numpy()
    except (TypeError, RuntimeError):  # no such dtype, or a lazy conjugate or negative
        resolved = tensor.resolve_conj().resolve_neg()
        out = (resolved if resolved.is_complex() else resolved.float()).numpy()
    return out


def _shared(array: Array) -> Tensor:
    """A tensor on the memory of ``array``, or on a copy where torch cannot share it."""
    native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    if not native.flags.writeable:
        native = native.copy()
    try:
        return torch.from_numpy(native)
    except TypeError:  # an integer or float width that torch does not have
        return torch.from_numpy(
            native.astype(np.int64 if native.dtype.kind in "iu" else np.float64)
        )


def _listed(value: Any) -> Array | None:
    """A non-tensor field with one entry per row; None for what has no rows."""
    if isinstance(value, np.ndarray):
        return value
    listed = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(listed, (list, tuple)):
        return None
    out = np.empty(len(listed), dtype=object)
    for row, item in enumerate(listed):
        out[row] = item
    return out
