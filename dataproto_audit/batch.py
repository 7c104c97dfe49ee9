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
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dataproto_audit.fingerprint import Hashes, row_hashes
from dataproto_audit.forms import parts_of
from dataproto_audit.policy import refuse_hidden
from dataproto_audit.storage import (
    dense,
    is_plain_jagged,
    jagged_values,
    laid_out,
    ragged_rows,
    shifted,
)

Layout = Literal["padded", "jagged"]
Array = NDArray[Any]

PROMPT_FIELDS = frozenset({"prompts"})
FULL_FIELDS = ("input_ids", "attention_mask", "position_ids")
RESPONSE_FIELDS = (
    "responses", "response_mask", "loss_mask", "tool_mask", "rollout_log_probs", "old_log_probs",
    "ref_log_prob", "token_level_scores", "token_level_rewards", "rm_scores", "values",
    "advantages", "returns", "entropys", "update_log_probs", "update_entropys", "update_values",
)  # fmt: skip
"""Fields with a response axis. Together they decide its width, so no broken one does alone."""
BLOCK_BYTES = 1 << 20
"""Row blocks are cut so that one field of a block is about this large and stays in cache."""


class _Sizes(NamedTuple):
    rows: int
    prompt: int | None
    response: int | None
    empty: frozenset[str]


_SIZES: dict[tuple[object, ...], _Sizes] = {}


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
        odd: Mapping[str, Any] | None = None,
    ) -> None:
        self.tensors = dict(tensors)
        self.arrays = dict(arrays)
        self.meta = meta
        self.untracked = frozenset(untracked)
        self.fits_declaration: int | None = None
        """Number of declared fields when all of them were found to fit; None before that."""
        self.odd = dict(odd or {})
        """Entries of a plain mapping that are no field at all, by name: a text, None..."""
        self.whole: BatchView = self
        """The batch as it is now, where this view shows how it was at an earlier stage."""
        self._numpy: dict[str, Array] = {}
        self.hashes: dict[str, Hashes] = {}

    @classmethod
    def of(cls, batch: Any) -> BatchView:
        """View ``batch``; :class:`UsageError` when it is no form of batch, or holds no data."""
        if isinstance(batch, BatchView):
            return batch
        parts = parts_of(batch)
        return cls(
            parts.tensors, parts.arrays, parts.meta, untracked=parts.untracked, odd=parts.odd
        )

    def only(self, names: Iterable[str]) -> BatchView:
        """A view of some fields, with the sizes of the whole batch."""
        kept = set(names)
        part = BatchView(
            {name: tensor for name, tensor in self.tensors.items() if name in kept},
            {name: array for name, array in self.arrays.items() if name in kept},
            self.meta,
            untracked=self.untracked & kept,
            odd={name: value for name, value in self.odd.items() if name in kept},
        )
        sizes = {"rows": self.rows, "prompt": self.prompt, "response": self.response}
        part.__dict__.update(sizes)  # where cached_property keeps them
        part.whole = self.whole
        part._numpy = self._numpy
        part.hashes = self.hashes
        return part

    def under(self, aliases: Mapping[str, tuple[str, int]]) -> BatchView:
        """A view in which fields bear our names: ours -> (name in the batch, shift of columns).

        Column ``t`` of the batch's field becomes column ``t + shift``; what has no source is 0.
        A source that the batch lacks is passed over. Raises :class:`UsageError` where a field
        would be read under two names, or written over another one.
        """
        tensors, arrays = dict(self.tensors), dict(self.arrays)
        refuse_hidden(aliases, self.names)
        for theirs, _ in aliases.values():
            tensors.pop(theirs, None)
            arrays.pop(theirs, None)
        for ours, (theirs, shift) in aliases.items():
            if theirs in self.arrays:
                arrays[ours] = self.arrays[theirs]
            elif theirs in self.tensors:
                tensors[ours] = shifted(self.tensors[theirs], shift)
        untracked = (*self.untracked, *aliases)
        return BatchView(tensors, arrays, self.meta, untracked=untracked, odd=self.odd)

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
    def signature(self) -> tuple[object, ...]:
        """Names, dtypes and shapes of all fields."""
        tensors = tuple(
            (name, t.dtype, tuple(self.lengths(name)) if t.is_nested else t.shape)
            for name, t in self.tensors.items()
        )
        return tensors, tuple((name, a.shape) for name, a in self.arrays.items())

    @cached_property
    def _sizes(self) -> _Sizes:
        """What follows from the signature; looked up, because most batches look like another."""
        found = _SIZES.get(self.signature)
        if found is None:
            if len(_SIZES) >= 1000:
                _SIZES.clear()
            found = _SIZES[self.signature] = self._measured()
        return found

    @cached_property
    def rows(self) -> int:
        """Number of rows: what most fields say, so that one broken field does not decide."""
        return self._sizes.rows

    @cached_property
    def response(self) -> int | None:
        """Width of the response axis; of a jagged batch, its longest row."""
        return self._sizes.response

    @cached_property
    def prompt(self) -> int | None:
        """Width of the prompt axis; of a jagged batch, its longest row."""
        return self._sizes.prompt

    @cached_property
    def empty(self) -> frozenset[str]:
        """Fields without a single value: no rows, or no columns."""
        return self._sizes.empty

    def _measured(self) -> _Sizes:
        rows = [t.size(0) for t in self.tensors.values() if t.dim()]
        rows += [a.shape[0] for a in self.arrays.values() if a.ndim]
        response = _most(self._width(name) for name in RESPONSE_FIELDS if name in self.tensors)
        prompts = [self._width("prompts")] if "prompts" in self.tensors else []
        if response is not None and self.layout == "padded":
            full = [self._width(name) for name in FULL_FIELDS if name in self.tensors]
            prompts += [w - response for w in full if w and w >= response]
        empty = {name for name, tensor in self.tensors.items() if not tensor.numel()}
        empty.update(name for name, array in self.arrays.items() if not array.size)
        return _Sizes(_most(rows) or 0, _most(prompts), response, frozenset(empty))

    def _width(self, name: str) -> int | None:
        tensor = self.tensors[name]
        if tensor.is_nested:
            return int(self.lengths(name).max(initial=0))
        return int(tensor.shape[-1]) if tensor.dim() >= 2 else None

    def lengths(self, name: str) -> NDArray[np.int64]:
        """Row lengths of a jagged field, ``[rows]``."""
        tensor: Any = self.tensors[name]
        if is_plain_jagged(tensor):
            lengths: NDArray[np.int64] = np.diff(tensor.offsets().cpu().numpy()).astype(np.int64)
            return lengths
        rows = ragged_rows(tensor)
        return np.fromiter((row.shape[0] for row in rows), np.int64, len(rows))

    def side_lengths(self, side: str) -> NDArray[np.int64]:
        """Attended tokens of ``prompts`` or ``responses`` in each row, however they are laid out.

        A padded side without an attention mask counts with its whole width.
        """
        if self.tensors[side].is_nested:
            return self.lengths(side)
        mask, width = self.tensors.get("attention_mask"), self.tensors[side].shape[-1]
        if mask is None or mask.is_nested or mask.dim() != 2:
            return np.full(self.rows, width, np.int64)
        attended = self.numpy("attention_mask") != 0
        part = attended[:, : self.prompt] if side == "prompts" else attended[:, self.prompt :]
        counted: NDArray[np.int64] = part.sum(1, dtype=np.int64)
        return counted

    def numpy(self, name: str) -> Array:
        """The field as a padded numpy array, without a copy where the memory allows it."""
        found = self._numpy.get(name)
        if found is None:
            found = self._numpy[name] = self._as_numpy(name)
        return found

    def read_as(self, name: str, array: Array) -> None:
        """From now on :meth:`numpy` gives ``array`` for the field. Fingerprints stay its own."""
        if name not in self.hashes and self.tensors[name].dim():
            self.hash_rows([name])
        self._numpy[name] = array

    def row_hashes(self, name: str) -> Hashes:
        """Fingerprint of each row of a tensor field (one that has an axis of rows)."""
        if name not in self.hashes:
            self.hash_rows([name])
        return self.hashes[name]

    def hash_rows(self, names: Iterable[str]) -> None:
        """Take the fingerprints of all these fields at once, which is cheaper than one by one."""
        news = [name for name in names if name not in self.hashes]
        arrays = [np.atleast_1d(self.numpy(name)) for name in news]
        self.hashes.update(zip(news, row_hashes(arrays), strict=True))

    def take_over(self, name: str, previous: BatchView) -> None:
        """Take over what ``previous`` computed of a tensor that is known to be unchanged."""
        self.hashes[name] = previous.hashes[name]
        if name in previous._numpy:
            self._numpy[name] = previous._numpy[name]

    def _as_numpy(self, name: str) -> Array:
        if name in self.arrays:
            return self.arrays[name]
        if name == "attention_mask" and name not in self.tensors and self.attention is not None:
            return self.attention
        tensor = self.tensors[name]
        return self._padded(name) if tensor.is_nested else dense(tensor)

    def _padded(self, name: str) -> Array:
        """Lay a jagged field out as a padded one: prompt part left-, response part right-padded.

        Cells that do not fit the batch's widths are left out; that they are there is for the
        contract to say.
        """
        lengths, values = self.lengths(name), jagged_values(self.tensors[name])
        prompt, response = self.prompt or 0, self.response or 0
        start, width = np.zeros_like(lengths), int(lengths.max(initial=0))
        if name in PROMPT_FIELDS:
            start, width = prompt - lengths, prompt
        elif name in RESPONSE_FIELDS:
            width = response
        elif name in FULL_FIELDS and "prompts" in self.tensors:
            left = self.side_lengths("prompts")
            start, width = start + prompt - left, prompt + response
        return laid_out(values, lengths, start, width)

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
