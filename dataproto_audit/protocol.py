"""DataProto: the batch of an RL post-training step, with verl's public API and behaviour.

``batch`` holds tensors, ``non_tensor_batch`` numpy arrays with one entry per row, ``meta_info``
what belongs to the batch as a whole. What this class does otherwise than verl's:

* errors name fields and counts, and are raised before anything was changed;
* in a union a NaN equals a NaN, for tensors as verl has it for arrays;
* batches without tensors work everywhere; jagged fields can be picked, cut, repeated and joined;
* ``load_from_disk`` executes nothing of the file, and reads both of verl's encodings.

As in verl, new batches share ``meta_info`` with the one they were made from, ``union``, ``pop``,
``rename``, ``reorder``, ``padding`` and ``to`` change the batch itself, and slices and chunks are
views. Errors are :class:`~dataproto_audit.codes.ProtocolError` unless a method says otherwise.
"""

import copy
import copyreg
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict

from dataproto_audit._protocol import build as _build
from dataproto_audit._protocol import columns as _columns
from dataproto_audit._protocol import index as _index
from dataproto_audit._protocol import merge as _merge
from dataproto_audit._protocol.config import DataProtoConfig
from dataproto_audit._protocol.disk import read_state_file, write_state
from dataproto_audit._protocol.errors import RowIndexError
from dataproto_audit._protocol.future import DataProtoFuture
from dataproto_audit._protocol.info import data_info, size_text
from dataproto_audit._protocol.merge import (
    list_of_dict_to_dict_of_list,
    union_numpy_dict,
    union_tensor_dict,
    union_two_dict,
)
from dataproto_audit._protocol.ops import (
    all_gather_data_proto,
    collate_fn,
    draw_positions,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
from dataproto_audit._protocol.same import same, same_fields
from dataproto_audit._protocol.wire import (
    deserialize_single_tensor,
    deserialize_tensordict,
    pack_batch,
    serialize_single_tensor,
    serialize_tensordict,
    unpack_batch,
)
from dataproto_audit.codes import ProtocolError

__all__ = [
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "all_gather_data_proto",
    "collate_fn",
    "deserialize_single_tensor",
    "deserialize_tensordict",
    "fold_batch_dim",
    "list_of_dict_to_dict_of_list",
    "pad_dataproto_to_divisor",
    "serialize_single_tensor",
    "serialize_tensordict",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "union_two_dict",
    "unpad_dataproto",
]


@dataclass
class DataProtoItem:
    """One row of a batch: what ``data[3]`` returns."""

    batch: Any = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataProto:
    """A batch: tensors, per-row objects and meta entries, moved and cut together."""

    # Any: a TensorDict or None. Callers index it without asking, as they do with verl's.
    batch: Any = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("non_tensor_batch", "meta_info"):
            if getattr(self, name) is None:  # verl's callers pass None for "nothing"
                setattr(self, name, {})
        self.check_consistency()

    def check_consistency(self) -> None:
        """Check that there is one row axis and that every array has one entry per row."""
        _build.check_rows(self.batch, self.non_tensor_batch)

    # -- construction and conversion -------------------------------------------------------------

    @classmethod
    def from_dict(
        cls,
        tensors: dict[str, torch.Tensor] | None = None,
        non_tensors: dict[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """Make a batch of tensors with equal first axes and of per-row lists or arrays.

        Lists become object arrays by numpy's rule: equal-length inner lists make a second axis.
        """
        if num_batch_dims < 1 or (non_tensors and num_batch_dims != 1):
            raise ProtocolError(f"num_batch_dims must be 1, not {num_batch_dims}.")
        batch = _build.batch_from_tensors(tensors or {}, num_batch_dims)
        arrays = {key: _build.array_of(value) for key, value in (non_tensors or {}).items()}
        meta_info = {} if meta_info is None else meta_info
        if auto_padding:
            meta_info = {**meta_info, DataProtoConfig.auto_padding_key: True}
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=meta_info)

    @classmethod
    def from_single_dict(
        cls,
        data: dict[str, torch.Tensor | np.ndarray],
        meta_info: dict[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> Self:
        """Make a batch of one mapping: tensors and numpy arrays are told apart by type."""
        tensors = {k: v for k, v in data.items() if isinstance(v, torch.Tensor)}
        arrays = {k: v for k, v in data.items() if isinstance(v, np.ndarray)}
        for key in data.keys() - tensors.keys() - arrays.keys():
            raise ProtocolError(
                f"field {key!r} is a {type(data[key]).__name__}.",
                "Give a tensor, or numpy.array(..., dtype=object).",
            )
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(
        cls,
        tensor_dict: TensorDict,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
    ) -> Self:
        """Make a batch of a TensorDict: stacks of objects are columns, single ones meta entries."""
        batch, arrays, meta = _build.parts_of_tensordict(tensor_dict, num_batch_dims)
        return cls(batch=batch, non_tensor_batch=arrays, meta_info={**(meta_info or {}), **meta})

    def to_tensordict(self) -> TensorDict:
        """Put everything into one TensorDict; :meth:`from_tensordict` undoes it."""
        parts = (self.batch, self.non_tensor_batch, self.meta_info)
        return _build.tensordict_of_parts(*parts, rows=len(self))

    def to(self, device: Any) -> Self:
        """Move the tensors, in place."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    # -- rows ------------------------------------------------------------------------------------

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        for value in self.non_tensor_batch.values():
            return int(value.shape[0])
        return 0

    def __eq__(self, other: object) -> bool:
        """Tell whether type, fields, values and meta entries are equal (NaN equals NaN)."""
        if not isinstance(other, DataProto) or type(self) is not type(other):
            return NotImplemented
        mine = (self.non_tensor_batch, self.meta_info)
        return same_fields(self.batch, other.batch) and same(
            mine, (other.non_tensor_batch, other.meta_info)
        )

    def __getitem__(self, item: Any) -> Any:
        """Pick rows: an integer gives a :class:`DataProtoItem`, anything else a batch.

        Errors: an ``IndexError`` too for a row that is not there; ``TypeError`` for other kinds.
        """
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, list) or (isinstance(item, (np.ndarray, torch.Tensor)) and item.ndim):
            return self.select_idxs(item)
        if not isinstance(item, (int, np.integer, np.ndarray, torch.Tensor)):
            raise TypeError(f"Indexing with {type(item)} is not supported")
        row, rows = int(item), len(self)
        if not -rows <= row < rows:
            raise RowIndexError(f"row {row} is outside a batch of {rows} rows.")
        return DataProtoItem(
            batch=None if self.batch is None else self.batch[row],
            non_tensor_batch={key: value[row] for key, value in self.non_tensor_batch.items()},
            meta_info=self.meta_info,
        )

    def _with(self, batch: Any, arrays: dict[str, np.ndarray]) -> Self:
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=self.meta_info)

    def _take(self, index: np.ndarray) -> Self:
        arrays = _index.take_arrays(self.non_tensor_batch, index)
        return self._with(_index.take_batch(self.batch, index), arrays)

    def select_idxs(self, idxs: Any) -> Self:
        """Copy the rows at these positions, or where the mask holds, in the given order."""
        return self._take(_index.row_index(idxs, len(self)))

    def slice(self, start: Any = None, end: Any = None, step: Any = None) -> Self:
        """Cut a range of rows, as a view of the same memory where the step allows."""
        rows = slice(start, end, step)
        if step is not None and step < 0:
            return self._take(np.arange(len(self))[rows])
        arrays = _index.take_arrays(self.non_tensor_batch, rows)
        return self._with(_index.slice_batch(self.batch, rows), arrays)

    def reorder(self, indices: Any) -> None:
        """Put the rows into this order, in place."""
        reordered = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = reordered.batch, reordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Repeat all rows: ``r0,r0,..,r1,r1,..`` or, not interleaved, ``r0,r1,..,r0,r1,..``."""
        return self._take(_index.repeat_index(len(self), repeat_times, interleave=interleave))

    def sample_level_repeat(self, repeat_times: Any) -> Self:
        """Repeat row i ``repeat_times[i]`` times, copies next to each other."""
        return self._take(_index.count_index(len(self), repeat_times))

    def unfold_column_chunks(self, n_split: int, split_keys: Iterable[str] | None = None) -> Self:
        """Cut the second axis of ``split_keys`` into ``n_split`` rows each; repeat the rest."""
        repeated = self.repeat(n_split)
        for key in split_keys or ():
            for mine, theirs in (
                (self.batch, repeated.batch),
                (self.non_tensor_batch, repeated.non_tensor_batch),
            ):
                if mine is not None and key in mine:
                    theirs[key] = _index.column_chunks(mine[key], n_split, key)
        return repeated

    def chunk(self, chunks: int) -> list[Self]:
        """Cut the rows into equal parts (unequal ones only with auto padding on)."""
        rows = len(self)
        if chunks < 1 or (rows % chunks and not self.is_padding_enabled()):
            raise ProtocolError(
                f"only support equal chunk: {rows} rows do not divide into {chunks} chunks.",
                "Pad with pad_dataproto_to_divisor, or turn auto padding on.",
            )
        sizes = _index.chunk_sizes(rows, chunks, as_torch=self.batch is not None)
        batches = _index.split_batch(self.batch, sizes)
        arrays = _index.split_arrays(self.non_tensor_batch, sizes)
        return [self._with(*part) for part in zip(batches, arrays, strict=True)]

    def split(self, split_size: int) -> list[Self]:
        """Cut the rows into parts of ``split_size``; the last one may be smaller."""
        return [self.slice(i, i + split_size) for i in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: "Sequence[DataProto]") -> "DataProto":
        """Put the rows of several batches under each other.

        ``metrics`` in the meta entries become a dict of lists; other entries must agree.
        """
        if not data:
            raise ProtocolError("a concat needs at least one batch.")
        return type(data[0])(
            batch=_merge.concat_batches([part.batch for part in data]),
            non_tensor_batch=_merge.concat_arrays([part.non_tensor_batch for part in data]),
            meta_info=_merge.concat_meta([part.meta_info for part in data]),
        )

    def is_padding_enabled(self) -> bool:
        """Tell whether auto padding is on, for this batch or for the process."""
        return bool(self.meta_info.get(DataProtoConfig.auto_padding_key)) or (
            DataProtoConfig.auto_padding
        )

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append the last row (or, with ``"first"``, the first one) so many times, in place."""
        if padding_candidate not in ("", "first", "last"):
            raise ProtocolError(f"padding_candidate is first or last, not {padding_candidate!r}.")
        rows = len(self)
        if padding_size and not rows:
            raise RowIndexError("a batch without rows has no row to pad with.")
        row = 0 if padding_candidate == "first" else rows - 1
        self.reorder(np.concatenate([np.arange(rows), np.full(padding_size, row)]))

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Iterate over mini-batches, in the order that verl's loader gives for the same seed.

        ``dataloader_kwargs`` go to torch's DataLoader, which here draws positions, not rows.
        """
        loader = draw_positions(len(self), mini_batch_size, seed, dataloader_kwargs)
        return (self.select_idxs(positions) for _ in range(epochs) for positions in loader)

    # -- columns ---------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """Keep these fields (None: all), sharing their memory; ``deepcopy`` is for non-tensors.

        Errors: a ``KeyError`` too for a tensor that is not there; other names may be missing.
        """
        arrays = _columns.select_entries(self.non_tensor_batch, non_tensor_batch_keys)
        meta = _columns.select_entries(self.meta_info, meta_info_keys)
        if deepcopy:
            arrays, meta = copy.deepcopy(arrays), copy.deepcopy(meta)
        batch = _columns.select_tensors(self.batch, batch_keys)
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=meta)

    def pop(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> Self:
        """Move these fields out of this batch into a new one; a ``KeyError`` if one is missing."""
        parts = (self.batch, self.non_tensor_batch, self.meta_info)
        popped = _columns.pop_all(parts, (batch_keys, non_tensor_batch_keys, meta_info_keys))
        tensors, arrays, meta = popped
        return type(self).from_dict(tensors, arrays, meta)

    def rename(self, old_keys: str | list[str], new_keys: str | list[str]) -> Self:
        """Rename tensors, in place."""
        _columns.rename_tensors(self.batch, old_keys, new_keys)
        return self

    def union(self, other: "DataProto") -> Self:
        """Add the other batch's fields to this one, in place; shared ones must be equal."""
        mine = (self.batch, self.non_tensor_batch, self.meta_info)
        theirs = (other.batch, other.non_tensor_batch, other.meta_info)
        self.batch = _merge.union_parts(mine, theirs, (len(self), len(other)))
        return self

    # -- bytes and text --------------------------------------------------------------------------

    def __getstate__(self) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        return pack_batch(self.batch), self.non_tensor_batch, self.meta_info

    def __reduce_ex__(self, protocol: Any) -> Any:
        if protocol < 5 or type(self).__getstate__ is not DataProto.__getstate__:
            return super().__reduce_ex__(protocol)
        packed = pack_batch(self.batch, out_of_band=True)
        state = (packed, self.non_tensor_batch, self.meta_info)
        return copyreg.__newobj__, (type(self),), state  # type: ignore[attr-defined] # not in stubs

    def __setstate__(self, state: tuple[Any, dict[str, Any], dict[str, Any]]) -> None:
        packed, self.non_tensor_batch, self.meta_info = state
        self.batch = unpack_batch(packed)

    def save_to_disk(self, filepath: str | PathLike[str]) -> None:
        """Write the batch in verl's file format, so that verl reads it; whole or not at all."""
        write_state(filepath, self.__getstate__())

    @classmethod
    def load_from_disk(cls, filepath: str | PathLike[str]) -> Self:
        """Read a file of :meth:`save_to_disk`, ours or verl's, executing nothing of it.

        Errors: ``UsageError`` for a missing or broken file, and for anything but plain data.
        """
        batch, arrays, meta = read_state_file(filepath)
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=meta)

    def print_size(self, prefix: str = "") -> None:
        """Print the sizes of tensors and arrays in GiB."""
        print(size_text(self.batch, self.non_tensor_batch, prefix))

    def get_data_info(self) -> str:
        """List all fields with shapes and types, one a line."""
        return data_info(self.batch, self.non_tensor_batch, self.meta_info)
