"""Pickling and saving a DataProto in both of verl's encodings."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict

from dataproto_audit.codes import ProtocolError, RunError
from dataproto_audit.protocol import (
    DataProto,
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)

METHOD = "VERL_DATAPROTO_SERIALIZATION_METHOD"
DTYPES = (
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.complex64,
)


@pytest.fixture(params=["torch", "numpy"])
def method(request, monkeypatch):
    monkeypatch.setenv(METHOD, request.param)
    return request.param


def rich_batch(rows=3):
    """Every kind of content that verl's own batches have."""
    tensors = {str(dtype): torch.arange(rows * 4).reshape(rows, 4).to(dtype) for dtype in DTYPES}
    tensors["flat"] = torch.rand(rows)
    tensors["slice"] = torch.arange(rows * 6).reshape(rows, 6)[:, ::2]
    tensors["no_columns"] = torch.empty(rows, 0, 2)
    if rows:
        pieces = [torch.arange(i + 1) for i in range(rows)]
        tensors["jagged"] = torch.nested.as_nested_tensor(pieces, layout=torch.jagged)
    objects = np.empty(rows, dtype=object)
    for i in range(rows):
        objects[i] = {"image": torch.rand(2, 3).t(), "dtype": torch.float16, "sizes": (1, {i})}
    arrays = {
        "uid": np.array([f"u{i}" for i in range(rows)], dtype=object),
        "text": np.array(["é" * (i + 1) for i in range(rows)], dtype="U5"),
        "bytes": np.array([b"x"] * rows, dtype="S3"),
        "big_endian": np.arange(rows, dtype=">i4"),
        "turns": np.arange(rows, dtype=np.int32),
        "columns_first": np.asfortranarray(np.arange(2.0 * rows).reshape(rows, 2)),
        "objects": objects,
        "grid": np.arange(2 * rows).reshape(rows, 2).astype(object),
    }
    meta = {
        "temperature": 1.0,
        "seen": np.int64(7),
        "nan": float("nan"),
        "size": torch.Size([1, 2]),
        "device": torch.device("cpu"),
        "weights": torch.arange(6).reshape(2, 3)[:, 1:],
        "buffer": bytearray(b"abc"),
        "nothing": None,
        "set": {1, 2},
        "nested": {"list": [np.float32(1.5), (True, b"raw", 2j)]},
    }
    return DataProto.from_dict(tensors, arrays, meta)


@st.composite
def small_batches(draw):
    rows = draw(st.integers(0, 5))
    values = st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=4))
    tree = st.recursive(values, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(), x))
    entries = draw(st.lists(tree, min_size=rows, max_size=rows))
    column = np.empty(rows, dtype=object)
    for row, entry in enumerate(entries):
        column[row] = entry
    dtype = draw(st.sampled_from(DTYPES))
    width = draw(st.integers(0, 3))
    tensors = {"x": torch.arange(rows * width).reshape(rows, width).to(dtype)}
    meta = draw(st.dictionaries(st.text(max_size=3), tree, max_size=2))
    return DataProto.from_dict(draw(st.sampled_from([tensors, None])), {"o": column}, meta)


# -- roundtrips ------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("rows", [0, 3])
def test_pickling_keeps_everything(method, protocol, rows):
    batch = rich_batch(rows)
    batch.non_tensor_batch.pop("big_endian")  # numpy's own pickling makes it native
    assert pickle.loads(pickle.dumps(batch, protocol=protocol)) == batch
    assert copy.deepcopy(batch) == batch


@given(small_batches(), st.sampled_from(["torch", "numpy"]), st.integers(2, 5))
def test_any_batch_survives_pickle_and_disk(tmp_path_factory, batch, method, protocol):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(METHOD, method)
        assert pickle.loads(pickle.dumps(batch, protocol=protocol)) == batch
        path = tmp_path_factory.mktemp("saved") / "batch.pkl"
        batch.save_to_disk(path)
    assert DataProto.load_from_disk(path) == batch


def test_protocol_5_leaves_the_bytes_out_of_band(monkeypatch):
    monkeypatch.setenv(METHOD, "numpy")
    batch = DataProto.from_dict({"x": torch.zeros(1000, 100), "y": torch.ones(1000)})
    buffers = []
    head = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert len(head) < 500
    assert sorted(buffer.raw().nbytes for buffer in buffers) == [4000, 400000]
    assert np.shares_memory(np.frombuffer(buffers[0], np.float32), batch.batch["x"].numpy())
    read_only = [memoryview(bytes(buffer)) for buffer in buffers]
    again = pickle.loads(head, buffers=read_only)
    assert again == batch
    again.batch["x"] += 1  # its own memory, not that of the sender


def test_files_are_the_same_whatever_wrote_them(method, tmp_path):
    batch = rich_batch()
    batch.save_to_disk(tmp_path / "ours.pkl")
    assert DataProto.load_from_disk(tmp_path / "ours.pkl") == batch
    for protocol in (4, 5):
        (tmp_path / "plain.pkl").write_bytes(pickle.dumps(batch, protocol=protocol))
        assert DataProto.load_from_disk(str(tmp_path / "plain.pkl")) == batch
    assert {path.name for path in tmp_path.iterdir()} == {"ours.pkl", "plain.pkl"}


def test_files_name_the_class_of_verl(tmp_path):
    DataProto(meta_info={"metrics": {"loss": 1.0}}).save_to_disk(tmp_path / "f")
    data = (tmp_path / "f").read_bytes()
    assert b"verl.protocol" in data
    assert b"dataproto_audit" not in data


@pytest.mark.parametrize(
    "batch",
    [
        DataProto(),
        DataProto(batch=TensorDict({}, batch_size=[4])),
        DataProto(non_tensor_batch={"a": np.array([1, 2])}),
        DataProto.from_dict({"x": torch.ones(2, device="cpu")}).to("cpu"),
    ],
    ids=["nothing", "no_fields", "no_tensors", "device"],
)
def test_batches_with_little_in_them(batch, method, tmp_path):
    batch.save_to_disk(tmp_path / "f")
    again = DataProto.load_from_disk(tmp_path / "f")
    assert again == batch == pickle.loads(pickle.dumps(batch))
    assert len(again) == len(batch)


def test_strided_nested_fields_survive(method, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.as_nested_tensor([torch.ones(2), torch.zeros(3)])
        batch = DataProto.from_dict({"s": nested})
        batch.save_to_disk(tmp_path / "f")
        assert DataProto.load_from_disk(tmp_path / "f") == batch
        assert pickle.loads(pickle.dumps(batch)) == batch


def test_a_sliced_batch_takes_only_its_own_rows_along(monkeypatch):
    monkeypatch.setenv(METHOD, "numpy")
    batch = DataProto.from_dict({"x": torch.zeros(10000, 8)})
    assert len(pickle.dumps(batch.chunk(100)[3])) < 5000


def test_single_tensors_pack_as_dtype_shape_and_bytes():
    dtype, shape, data = serialize_single_tensor(torch.ones(2, 3, dtype=torch.bfloat16))
    assert (dtype, shape, data.dtype, data.size) == ("bfloat16", (2, 3), np.uint8, 12)
    scalar = torch.tensor(2.5, requires_grad=True)
    assert deserialize_single_tensor(serialize_single_tensor(scalar)) == 2.5
    packed = serialize_tensordict(TensorDict({"x": torch.ones(2)}, batch_size=[2], device="cpu"))
    assert packed[:2] == ((2,), "cpu")
    assert deserialize_tensordict(packed)["x"].tolist() == [1, 1]
    assert deserialize_tensordict(((2,), "cuda:0", packed[2])).batch_size == torch.Size([2])


def test_tensors_that_are_none():
    with pytest.raises(ProtocolError, match="'n' of the batch is a NonTensorData"):
        serialize_tensordict(TensorDict({"n": NonTensorData("q")}, batch_size=[2]))
    for packed, fragment in (
        (("float33", (1,), b"1234"), "'float33' is not the name"),
        (("float32", (1,), 10**12), "packed as a int, not bytes"),
        (("float32", (1,), np.zeros(1, dtype=object)), "items of format 'O'"),
    ):
        with pytest.raises(ProtocolError, match=fragment):
            deserialize_single_tensor(packed)
    with pytest.raises(ProtocolError, match="'x' is packed in an unknown way"):
        deserialize_tensordict(((1,), None, {"x": (1,)}))


# -- writing ---------------------------------------------------------------------------------------


def test_a_failed_save_names_the_culprit_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "f"
    DataProto(meta_info={"a": 1}).save_to_disk(path)
    with pytest.raises(ProtocolError, match=r"meta_info\['b'\] cannot be pickled"):
        DataProto(meta_info={"a": 1, "b": lambda: 0}).save_to_disk(path)
    column = np.array([lambda: 0, None], dtype=object)
    with pytest.raises(ProtocolError, match=r"non_tensor_batch\['u'\] cannot be pickled"):
        DataProto(non_tensor_batch={"u": column}).save_to_disk(path)
    assert DataProto.load_from_disk(path).meta_info == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    with pytest.raises(RunError, match=r"DPA802 .*nowhere.*: the folder does not exist"):
        DataProto().save_to_disk(tmp_path / "nowhere" / "f")
