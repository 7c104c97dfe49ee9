"""DataProto's columns and construction: what they do, and the text of their errors."""

import copy
import pickle
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from dataproto_audit.codes import ProtocolError, UsageError
from dataproto_audit.protocol import (
    DataProto,
    DataProtoFuture,
    all_gather_data_proto,
    fold_batch_dim,
    list_of_dict_to_dict_of_list,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)


def make_batch(rows):
    prompts = np.empty(rows, dtype=object)
    for i in range(rows):
        prompts[i] = [{"role": "user", "content": str(i)}] * (i % 3)
    return DataProto.from_dict(
        {f"t{i}": torch.arange(rows * 3).reshape(rows, 3) + i for i in range(3)},
        {"uid": np.array([f"u{i}" for i in range(rows)], dtype=object), "raw_prompt": prompts},
        {"temperature": 1.0},
    )


def jagged(*lengths):
    pieces = [torch.arange(length) for length in lengths]
    nested = torch.nested.as_nested_tensor(pieces, layout=torch.jagged)
    return TensorDict({"jagged": nested}, batch_size=[len(lengths)])


# -- columns ---------------------------------------------------------------------------------------


def test_union_explains_a_missing_repetition_and_changes_nothing():
    prompts, rollouts = make_batch(3), DataProto.from_dict({"responses": torch.zeros(12, 2)})
    before = copy.deepcopy(prompts)
    with pytest.raises(ProtocolError, match="12 = 4 x 3: the left side was not repeated by 4"):
        prompts.union(rollouts)
    with pytest.raises(AssertionError, match="the right side was not repeated"):
        rollouts.union(prompts)
    with pytest.raises(ProtocolError, match="rows were lost or added"):
        prompts.union(rollouts[:4])
    other = copy.deepcopy(before)
    other.batch["new"] = torch.zeros(3)
    other.meta_info["temperature"] = 0.5
    with pytest.raises(ProtocolError, match=r"temperature .* not the same object: 1\.0 against 0"):
        prompts.union(other)
    assert prompts == before


def test_union_merges_in_place_and_nan_equals_nan():
    left = DataProto.from_dict({"a": torch.tensor([1.0, torch.nan])}, {"u": [torch.nan, "x"]})
    right = copy.deepcopy(left)
    right.batch["b"] = torch.zeros(2)
    right.meta_info["t"] = torch.tensor([torch.nan])
    assert left.union(right) is left
    assert set(left.batch.keys()) == {"a", "b"}
    left.union(right)
    no_tensors = DataProto.from_dict(non_tensors={"v": [1, 2]})
    assert no_tensors.union(left).batch is left.batch
    assert DataProto(meta_info={"x": 1}).union(left).meta_info.keys() == {"x", "t"}


def test_union_says_how_shared_fields_differ():
    ids = torch.arange(12).reshape(4, 3)
    left = TensorDict({"ids": ids}, batch_size=[4])

    def with_ids(value):
        return TensorDict({"ids": value}, batch_size=[4])

    with pytest.raises(ProtocolError, match="the same rows in another order"):
        union_tensor_dict(left, with_ids(ids[[1, 0, 2, 3]]))
    changed = ids.clone()
    changed[2, 1] = 70
    expected = r"1 of 12 cells in 1 of 4 rows differ, first at \[2, 1\] \(7 against 70\)"
    with pytest.raises(ProtocolError, match=expected):
        union_tensor_dict(left, with_ids(changed))
    with pytest.raises(ProtocolError, match=r"dtype torch\.int64 against torch\.int32"):
        union_tensor_dict(left, with_ids(ids.int()))
    with pytest.raises(ProtocolError, match=r"shape \[4, 3\] against \[4, 2\]"):
        union_tensor_dict(left, with_ids(ids[:, :2]))
    with pytest.raises(ProtocolError, match="identical batch size"):
        union_tensor_dict(left, TensorDict({}, batch_size=[2, 2]))
    union_tensor_dict(jagged(1, 3), jagged(1, 3))
    with pytest.raises(ProtocolError, match="rows differ in length or value"):
        union_tensor_dict(jagged(1, 3), jagged(1, 2))
    array = np.array([{"a": [1, 2]}, {"a": [torch.nan]}], dtype=object)
    union_numpy_dict({"o": array}, {"o": copy.deepcopy(array)})
    with pytest.raises(ProtocolError, match=r"first at \[0\] \({'a': \[1, 2\]} against 3\)"):
        union_numpy_dict({"o": array}, {"o": np.array([3, 4], dtype=object)})
    with pytest.raises(ProtocolError, match="float64 against int64"):
        union_numpy_dict({"o": np.zeros(1)}, {"o": np.zeros(1, dtype=np.int64)})
    with pytest.raises(ProtocolError, match="`o` on the left is a list"):
        union_numpy_dict({"o": [1]}, {"o": np.zeros(1)})


def test_concat_merges_metrics_and_refuses_what_differs():
    def part(rows=2, width=3, **meta):
        return DataProto.from_dict({"x": torch.zeros(rows, width)}, meta_info=meta)

    merged = DataProto.concat([part(metrics={"a": 1}), part(metrics=[{"a": 2}, {"a": 3}], t=1)])
    assert merged.meta_info == {"metrics": {"a": [1, 2, 3]}, "t": 1}
    with pytest.raises(ProtocolError, match="'t': 1 in part 0, 2 in part 1"):
        DataProto.concat([part(t=1), part(t=2)])
    with pytest.raises(ProtocolError, match=r"\[2, 3\] in part 0 and \[2, 4\] in part 2"):
        DataProto.concat([part(), part(), part(width=4)])
    with pytest.raises(KeyError, match=r"part 1 of a concat has no field 'x'. It has: y"):
        DataProto.concat([part(), part().rename("x", "y")])
    with pytest.raises(ProtocolError, match=r"parts \[1\] of a concat have no tensors"):
        DataProto.concat([part(), DataProto()])
    with pytest.raises(ProtocolError, match="at least one batch"):
        DataProto.concat([])
    with pytest.raises(ProtocolError, match=r"'w' has shapes \[\[1, 2\], \[1, 3\]\]"):
        DataProto.concat([DataProto(non_tensor_batch={"w": np.zeros((1, n))}) for n in (2, 3)])
    with pytest.raises(AssertionError, match="'b' of part 1 is not present"):
        list_of_dict_to_dict_of_list([{"a": 1}, {"b": 2}])


def test_select_pop_and_rename():
    batch = make_batch(3)
    kept = batch.select(["t0"], ["uid", "nowhere"], [])
    assert (list(kept.batch.keys()), list(kept.non_tensor_batch), kept.meta_info) == (
        ["t0"],
        ["uid"],
        {},
    )
    assert kept.batch["t0"] is batch.batch["t0"]
    assert batch.select().meta_info is batch.meta_info
    deep = batch.select(deepcopy=True)
    assert deep == batch
    assert deep.non_tensor_batch["raw_prompt"][1] is not batch.non_tensor_batch["raw_prompt"][1]
    with pytest.raises(KeyError, match=r"the tensor batch has no field 'x'\. It has: t0, t1"):
        batch.select(["x"])
    before = copy.deepcopy(batch)
    with pytest.raises(AssertionError, match="the non-tensor batch has no field 'y'"):
        batch.pop(["t0"], ["y"])
    assert batch == before
    assert batch.pop(["t0"], ["uid"], ["temperature"]) == before.select(
        ["t0"], ["uid"], ["temperature"]
    )
    assert "t0" not in batch.batch
    first, second = batch.batch["t1"], batch.batch["t2"]
    batch.rename(["t1", "t2"], ["t2", "t1"])
    assert batch.batch["t1"] is second
    assert batch.batch["t2"] is first
    with pytest.raises(ValueError, match="2 old names for 1 new names"):
        batch.rename(["t1", "t2"], ["a"])
    with pytest.raises(TypeError, match="list or a string"):
        batch.rename(("t1",), "a")


# -- construction and errors -----------------------------------------------------------------------


def test_construction_names_the_field_that_does_not_fit():
    with pytest.raises(ProtocolError, match=r"12 = 4 x 3: field 'a' was not repeated by 4"):
        DataProto.from_dict({"a": torch.zeros(3), "b": torch.zeros(12, 2)})
    with pytest.raises(ProtocolError, match=r"'uid' has 3 entries for 6 rows.*2 x 3: field 'uid'"):
        DataProto.from_dict({"a": torch.zeros(6)}, {"uid": ["x"] * 3})
    with pytest.raises(ProtocolError, match="needs a row axis"):
        DataProto.from_dict({"a": torch.tensor(3)})
    with pytest.raises(ProtocolError, match="'a' is a list, not an array of rows"):
        DataProto(non_tensor_batch={"a": [1]})
    with pytest.raises(ProtocolError, match=r"one row axis, this one has batch size \[2, 2\]"):
        DataProto(batch=TensorDict({}, batch_size=[2, 2]))
    with pytest.raises(ValueError, match="'a' is a list"):
        DataProto.from_single_dict({"a": [1]})
    with pytest.raises(ProtocolError, match="num_batch_dims"):
        DataProto.from_dict({"a": torch.zeros(2, 2)}, {"u": ["x", "y"]}, num_batch_dims=2)
    with pytest.raises(ProtocolError, match=r"\['a'\] name more than one thing"):
        DataProto.from_dict({"a": torch.zeros(2)}, {"a": ["x", "y"]}).to_tensordict()


def test_from_dict_leaves_its_arguments_alone():
    columns, meta = {"uid": ["x", "y"]}, {"t": 1}
    batch = DataProto.from_dict({"a": torch.zeros(2)}, columns, meta, auto_padding=True)
    assert columns == {"uid": ["x", "y"]}
    assert meta == {"t": 1}
    assert batch.is_padding_enabled()


@pytest.mark.parametrize(
    ("item", "error", "fragment"),
    [
        (5, IndexError, "row 5 is outside a batch of 3 rows"),
        ([0, -4], IndexError, "row -4 is outside"),
        ([True, False], IndexError, r"mask of shape \(2,\) cannot pick from 3 rows"),
        ([0.5], ProtocolError, "not by float64"),
        ((0, 1), TypeError, "not supported"),
        ("t0", TypeError, "not supported"),
    ],
)
def test_wrong_indices(item, error, fragment):
    with pytest.raises(error, match=fragment):
        make_batch(3)[item]


def test_wrong_counts():
    batch = make_batch(3)
    with pytest.raises(ProtocolError, match="repeated -1 times"):
        batch.repeat(-1)
    with pytest.raises(ProtocolError, match=r"shape \(2,\) for 3 rows"):
        batch.sample_level_repeat((1, 2))
    with pytest.raises(ProtocolError, match="non-negative integers"):
        batch.sample_level_repeat(np.array([1, -2, 3]))
    with pytest.raises(AssertionError, match="not set"):
        batch.sample_level_repeat({1})
    with pytest.raises(ProtocolError, match="folded into 2 equal groups"):
        fold_batch_dim(batch, 2)
    with pytest.raises(ProtocolError, match="has no 3 axes"):
        unfold_batch_dim(batch, 3)
    with pytest.raises(ProtocolError, match="size_divisor must be at least 1"):
        pad_dataproto_to_divisor(batch, 0)
    with pytest.raises(ProtocolError, match="4 pad rows cannot be dropped from 3"):
        unpad_dataproto(batch, 4)
    with pytest.raises(AssertionError, match="must be a DataProto, not a dict"):
        pad_dataproto_to_divisor({}, 2)


def test_errors_survive_pickling():
    for item in (5, [5]):
        with pytest.raises(IndexError) as caught:
            make_batch(3)[item]
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), str(again)) == (type(caught.value), str(caught.value))


def test_strided_nested_fields_can_be_cut_and_joined():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.as_nested_tensor([torch.ones(2), torch.zeros(3), torch.ones(1)])
    batch = DataProto.from_dict({"s": nested, "x": torch.arange(3)})
    assert DataProto.concat([batch[:1], batch[1:]]) == batch
    assert "s: (3, -1)" in batch.get_data_info()
    assert len(batch[[]]) == 0


def test_descriptions(capsys):
    batch = make_batch(2)
    batch.meta_info.update(
        sizes=[1, 2], pair=(1, "a"), table={"a": 1.5}, array=np.zeros(2), none=None, empty=[]
    )
    info = batch.get_data_info()
    for line in (
        "  t0: (2, 3) (torch.int64) cpu",
        "  uid: ndarray(2,) (object)",
        "  sizes: list[int]",
        "  pair: tuple(int, str)",
        "  table: dict[str: float]",
        "  array: ndarray(2,) (float64)",
        "  empty: list[...]",
        "  none: NoneType",
    ):
        assert line in info.splitlines()
    batch.print_size("after rollout")
    assert capsys.readouterr().out.startswith("after rollout, Size of tensordict: ")
    assert batch.to("cpu") is batch


def test_equality_looks_at_everything():
    batch = make_batch(3)
    assert batch == copy.deepcopy(batch)
    assert batch != DataProto()
    assert batch != 3
    for change in (
        lambda other: other.batch.__setitem__("t0", other.batch["t0"] + 1),
        lambda other: other.batch.__setitem__("more", other.batch["t0"]),
        lambda other: other.non_tensor_batch["uid"].__setitem__(0, "v"),
        lambda other: other.meta_info.update(temperature=2),
    ):
        other = copy.deepcopy(batch)
        change(other)
        assert batch != other


def test_a_future_needs_ray(monkeypatch):
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    with pytest.raises(UsageError, match=r"DPA858 .* ray is not in use here"):
        DataProtoFuture.concat(["reference"]).get()


def test_a_future_joins_all_parts_and_gives_each_receiver_its_chunk(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=list))
    whole = make_batch(6)
    future = DataProtoFuture.concat(whole.split(2))
    assert future.get() == whole
    assert [part.get() for part in future.chunk(3)] == whole.chunk(3)
    tensors = DataProtoFuture.concat([part.batch for part in whole.split(3)]).get()
    assert DataProto(batch=tensors) == DataProto(batch=whole.batch)
    with pytest.raises(ProtocolError, match="worker 1 returned a int"):
        DataProtoFuture.concat([whole, 3]).get()


def test_rows_of_all_ranks_are_gathered():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        batch = make_batch(3)
        gathered = copy.deepcopy(batch)
        assert all_gather_data_proto(gathered, torch.distributed.group.WORLD) is None
        assert gathered == batch
        no_tensors = DataProto(non_tensor_batch=dict(batch.non_tensor_batch))
        all_gather_data_proto(no_tensors, torch.distributed.group.WORLD)
        assert len(no_tensors) == 3
    finally:
        torch.distributed.destroy_process_group()
    with pytest.raises(ProtocolError, match="not a list"):
        all_gather_data_proto([], None)


def test_what_is_no_batch_in_a_tensordict():
    inner = TensorDict({"inner": TensorDict({}, batch_size=[2])}, batch_size=[2])
    with pytest.raises(ProtocolError, match="'inner' is a TensorDict"):
        DataProto.from_tensordict(inner)
    mixed = make_batch(2).to_tensordict()
    with pytest.raises(ProtocolError, match="num_batch_dims must be 1, not 2"):
        DataProto.from_tensordict(mixed, num_batch_dims=2)
    assert len(DataProto.from_tensordict(TensorDict({}, batch_size=[4]))) == 4


def test_picking_follows_the_device():
    moved = DataProto.from_dict({"x": torch.zeros(3, 2)}).to("meta")
    assert moved[[2, 0]].batch["x"].shape == (2, 2)
    assert moved[[2, 0]].batch["x"].device.type == "meta"


def test_a_batch_without_rows_is_not_padded():
    empty = make_batch(3)[[]]
    assert pad_dataproto_to_divisor(empty, 4) == (empty, 0)
