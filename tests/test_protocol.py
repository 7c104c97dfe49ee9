"""DataProto's algebra of rows: properties that hold for every batch."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto_audit.codes import ProtocolError
from dataproto_audit.protocol import (
    DataProto,
    DataProtoConfig,
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)

DTYPES = (torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.bool, torch.uint8)


def make_batch(rows, *, dtypes=DTYPES, columns=(), jagged=False, tensors=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    fields = {
        f"t{i}": (torch.randn(rows, 3, *columns, generator=generator) * 5).to(dtype)
        for i, dtype in enumerate(dtypes)
    }
    if jagged and rows:
        pieces = [torch.arange(1 + (seed + i) % 4) for i in range(rows)]
        fields["jagged"] = torch.nested.as_nested_tensor(pieces, layout=torch.jagged)
    objects = np.empty(rows, dtype=object)
    for i in range(rows):
        objects[i] = [{"role": "user", "content": str(i)}] * (i % 3)
    arrays = {
        "uid": np.array([f"u{i // 2}" for i in range(rows)], dtype=object),
        "score": np.arange(rows) / 7,
        "turns": np.arange(rows, dtype=np.int32),
        "raw_prompt": objects,
        "wide": np.arange(2 * rows).reshape(rows, 2).astype(object),
    }
    return DataProto.from_dict(fields if tensors else None, arrays, {"temperature": 1.0})


@st.composite
def batches(draw, min_rows=0, max_rows=9):
    return make_batch(
        draw(st.integers(min_rows, max_rows)),
        dtypes=draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3)),
        columns=draw(st.lists(st.integers(0, 3), max_size=2)),
        jagged=draw(st.booleans()),
        tensors=draw(st.booleans()),
        seed=draw(st.integers(0, 100)),
    )


# -- rows ------------------------------------------------------------------------------------------


@given(batches(min_rows=1), st.integers(1, 9), st.integers(1, 9))
def test_chunks_and_splits_concatenate_back(batch, chunks, size):
    assert DataProto.concat(batch.split(size)) == batch
    if len(batch) % chunks == 0:
        parts = batch.chunk(chunks)
        assert [len(part) for part in parts] == [len(batch) // chunks] * chunks
        assert DataProto.concat(parts) == batch


@given(batches(), st.integers(0, 4))
def test_repeats_pick_the_rows_they_say(batch, times):
    interleaved, tiled = batch.repeat(times), batch.repeat(times, interleave=False)
    assert len(interleaved) == len(tiled) == times * len(batch)
    for copy_number in range(times):
        assert interleaved[copy_number::times] == batch
        assert tiled[copy_number * len(batch) : (copy_number + 1) * len(batch)] == batch
    assert batch.sample_level_repeat([times] * len(batch)) == interleaved


@given(batches(min_rows=1), st.randoms(use_true_random=False))
def test_reorder_by_the_inverse_restores_the_order(batch, random):
    order = list(range(len(batch)))
    random.shuffle(order)
    shuffled = copy.deepcopy(batch)
    shuffled.reorder(torch.tensor(order))
    assert shuffled == batch[order] == batch[np.array(order)] == batch[torch.tensor(order)]
    shuffled.reorder(np.argsort(order))
    assert shuffled == batch


@given(batches(min_rows=1), st.data())
def test_masks_lists_and_slices_agree(batch, data):
    rows = len(batch)
    mask = data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    positions = [i for i, keep in enumerate(mask) if keep]
    picked = batch[positions]
    assert picked == batch[mask] == batch[np.array(mask)] == batch[torch.tensor(mask)]
    assert picked == batch[[i - rows for i in positions]]
    cut = data.draw(st.slices(rows))
    assert batch[cut] == batch[list(range(rows))[cut]]


@given(batches(min_rows=1), st.integers(1, 20))
def test_padding_to_a_divisor_is_undone_by_unpad(batch, divisor):
    padded, pad_size = pad_dataproto_to_divisor(batch, divisor)
    assert len(padded) % divisor == 0
    assert 0 <= pad_size < divisor
    assert unpad_dataproto(padded, pad_size) == batch
    assert padded[len(batch) :] == batch[[i % len(batch) for i in range(pad_size)]]


@given(st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_fold_is_undone_by_unfold(groups, each, tensors):
    batch = make_batch(groups * each, tensors=tensors)
    folded = fold_batch_dim(batch, groups)
    assert len(folded) == groups
    assert folded.non_tensor_batch["uid"].shape == (groups, each)
    assert unfold_batch_dim(folded) == batch


@given(batches(min_rows=1))
def test_single_rows_collate_back(batch):
    if batch.batch is not None and "jagged" in batch.batch:
        batch.pop(["jagged"])
    again = collate_fn([batch[i] for i in range(len(batch))])
    if batch.batch is not None:
        assert set(again.batch.keys()) == set(batch.batch.keys())
        assert all(value.equal(batch.batch[key]) for key, value in again.batch.items())
    for key in ("uid", "raw_prompt", "score"):
        assert again.non_tensor_batch[key].tolist() == batch.non_tensor_batch[key].tolist()


def test_an_integer_gives_one_row_and_iteration_ends():
    batch = make_batch(3)
    for three in (2, -1, np.int64(2), torch.tensor(2), np.array(2)):
        assert batch[three].batch["t0"].equal(batch.batch["t0"][2])
        assert batch[three].non_tensor_batch["uid"] == "u1"
    assert len(list(batch)) == 3
    assert list(DataProto()) == []


def test_slices_and_chunks_share_memory_and_indexing_does_not():
    batch = make_batch(4)
    batch[1:3].batch["t0"][:] = 7
    batch.chunk(2)[0].batch["t0"][0] = 8
    batch[[3]].batch["t0"][:] = 9
    assert batch.batch["t0"][:, 0].tolist()[:3] == [8, 7, 7]
    assert batch.batch["t0"][3, 0] != 9


def test_chunks_may_be_unequal_only_with_auto_padding(monkeypatch):
    with pytest.raises(ProtocolError, match="7 rows do not divide into 3 chunks"):
        make_batch(7).chunk(3)
    padded = DataProto.from_dict({"x": torch.arange(7)}, auto_padding=True)
    assert [len(part) for part in padded.chunk(3)] == [3, 3, 1]
    with pytest.raises(ProtocolError, match="make 3 chunks, 4 are asked for"):
        DataProto.from_dict({"x": torch.arange(5)}, auto_padding=True).chunk(4)
    monkeypatch.setenv("VERL_AUTO_PADDING", "true")
    assert [len(part) for part in make_batch(7, tensors=False).chunk(3)] == [3, 2, 2]


def test_auto_padding_can_be_set_for_the_process():
    assert not make_batch(2).is_padding_enabled()
    DataProtoConfig.auto_padding = True
    try:
        assert make_batch(2).is_padding_enabled()
    finally:
        DataProtoConfig.auto_padding = False
    with pytest.raises(AssertionError, match="boolean"):
        DataProtoConfig.auto_padding = 1


def test_padding_appends_one_row_in_place():
    batch = make_batch(3)
    last, first = copy.deepcopy(batch), copy.deepcopy(batch)
    last.padding(2)
    first.padding(1, "first")
    assert last == batch[[0, 1, 2, 2, 2]]
    assert first == batch[[0, 1, 2, 0]]
    with pytest.raises(ProtocolError, match="first or last"):
        batch.padding(1, "middle")
    with pytest.raises(ProtocolError, match="no row to pad with"):
        DataProto().padding(1)


def test_column_chunks_become_rows():
    batch = DataProto.from_dict(
        {"a": torch.arange(8).reshape(2, 4), "b": torch.tensor([5, 6])},
        {"c": [["x", "y"], ["z", "w"]], "d": ["m", "n"]},
    )
    unfolded = batch.unfold_column_chunks(2, split_keys=["a", "c"])
    assert unfolded.batch["a"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert unfolded.batch["b"].tolist() == [5, 5, 6, 6]
    assert unfolded.non_tensor_batch["c"].tolist() == [["x"], ["y"], ["z"], ["w"]]
    assert unfolded.non_tensor_batch["d"].tolist() == ["m", "m", "n", "n"]
    with pytest.raises(ProtocolError, match=r"'b' of shape \[2\] has no second axis"):
        batch.unfold_column_chunks(2, split_keys=["b"])


def test_the_iterator_covers_every_epoch_in_a_seeded_order():
    batch = make_batch(6, jagged=True)
    shuffled = {"seed": 3, "dataloader_kwargs": {"shuffle": True}}
    once = list(batch.make_iterator(2, 2, **shuffled))
    again = list(batch.make_iterator(2, 2, **shuffled))
    assert once == again
    assert [len(part) for part in once] == [2] * 6
    epochs = [DataProto.concat(once[:3]), DataProto.concat(once[3:])]
    for epoch in epochs:
        assert sorted(epoch.non_tensor_batch["turns"]) == list(range(6))
    assert epochs[0] != epochs[1]
    assert all(part.meta_info is batch.meta_info for part in once)
    with pytest.raises(ProtocolError, match="6 % 4 != 0"):
        batch.make_iterator(4, 1)


@given(batches(min_rows=1))
def test_tensordict_and_back(batch):
    again = DataProto.from_tensordict(batch.to_tensordict())
    for key, value in batch.non_tensor_batch.items():  # columns come back as object arrays
        assert again.non_tensor_batch[key].tolist() == value.tolist()
    assert again.select(non_tensor_batch_keys=[]) == batch.select(non_tensor_batch_keys=[])
