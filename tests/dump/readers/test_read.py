"""Every sample opens without the framework that wrote it, and says what its README says."""

import io
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from dataproto_audit.batch import BatchView
from dataproto_audit.codes import UsageError
from dataproto_audit.dump.readers import read_batches, read_folder
from dataproto_audit.protocol import DataProto

FILES = [f"verl-{v}/files_{m}" for v in ("0.7.1", "0.9.1") for m in ("numpy", "torch")]


def only(path):
    (saved,) = read_batches(path)
    return saved


def test_every_sample_opens(samples):
    folder = read_folder(samples)
    assert {error.code for error in folder.unreadable} == {"DPA810"}
    assert all("strided_nested.pkl is empty (0 bytes)" in str(e) for e in folder.unreadable)
    assert len(folder.saved) > 180
    for saved in folder.saved:
        view = BatchView.of(saved.batch)
        assert view.rows == saved.rows
        for name in view.names:
            assert len(view.numpy(name)) == view.rows, saved.label
        assert saved.opaque == ()
        assert not saved.path.name.startswith("stages")


def test_reading_imports_no_framework(samples):
    code = (
        "import sys; from dataproto_audit.dump.readers import read_batches;"
        f"read_batches({str(samples / FILES[0] / 'plain.pkl')!r});"
        f"read_batches({str(samples / 'openrlhf/healthy/experiences.pt')!r});"
        "print([m for m in ('verl', 'ray', 'transformers', 'openrlhf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("folder", FILES)
def test_both_serialisations_of_a_dataproto(folder, samples):
    saved = only(samples / folder / "plain.pkl")
    assert saved.kind == "dataproto"
    assert saved.tensors
    assert all(isinstance(t, torch.Tensor) for t in saved.tensors.values())
    assert all(isinstance(a, np.ndarray) for a in saved.arrays.values())
    again = DataProto.load_from_disk(samples / folder / "plain.pkl")
    assert again.batch.keys() == saved.tensors.keys()
    sliced = only(samples / folder / "sliced.pkl")
    assert 0 < sliced.rows < saved.rows
    assert any(t.is_nested for t in only(samples / folder / "jagged.pkl").tensors.values())
    assert only(samples / folder / "no_batch.pkl").tensors == {}
    assert only(samples / folder / "metrics_only.pkl").meta["metrics"]
    assert only(samples / folder / "empty_batch.pkl").tensors == {}


@pytest.mark.parametrize("folder", FILES)
@pytest.mark.parametrize("name", ["td_pickle.pt", "td_torchsave.pt"])
def test_tensordicts_pickled_and_saved_by_torch(folder, name, samples):
    saved, plain = only(samples / folder / name), only(samples / folder / "plain.pkl")
    assert saved.kind == "tensordict"
    for key, tensor in plain.tensors.items():
        other = saved.tensors[key]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
        assert other.is_floating_point() or torch.equal(other, tensor)
    assert saved.meta["temperature"] == 1.0
    assert set(saved.arrays) & set(plain.arrays)


def test_a_jagged_tensordict(samples):
    folder = samples / "verl-0.9.1/files_torch"
    pickled, saved = only(folder / "td_nopad_pickle.pt"), only(folder / "td_nopad_torchsave.pt")
    nested = [name for name, tensor in saved.tensors.items() if tensor.is_nested]
    assert nested
    for name in nested:
        for one, other in zip(
            saved.tensors[name].unbind(), pickled.tensors[name].unbind(), strict=True
        ):
            torch.testing.assert_close(one, other, equal_nan=True)


def test_values_are_those_that_torch_reads(samples):
    path = samples / "slime/healthy/train_data/0.pt"
    theirs = torch.load(path, weights_only=True)
    saved = only(path)
    for row, sample in zip(saved.tensors["old_log_probs"].unbind(), theirs["samples"], strict=True):
        assert torch.equal(row, sample["log_probs"])


@pytest.mark.parametrize("suffix", ["", ".call1", ".call2"])
def test_keys_and_tags_beside_a_store_snapshot(suffix, samples):
    folder = samples / "verl-0.9.1/v1_colocate_async"
    saved = only(folder / f"v1.tq_all_before._update_actor{suffix}.td.pt")
    assert saved.meta["keys_from"] == f"v1._update_actor.in{suffix}.kvmeta.json"
    assert BatchView.of(saved.batch).layout == "jagged"
    keys, uids = saved.arrays["store_key"], saved.arrays["uid"]
    assert all(key.startswith(uid) for key, uid in zip(keys, uids, strict=True))
    lengths = [len(row) for row in saved.tensors["responses"].unbind()]
    assert list(saved.arrays["tag.response_len"]) == lengths
    weights = set(saved.arrays["tag.max_global_steps"])
    assert weights == {saved.hint.call if not suffix else saved.hint.call - 1}
    other = only(folder / f"v1.tq_all_before._compute_old_log_prob{suffix}.td.pt")
    assert other.meta["keys_from"] == f"v1._balance_batch.out{suffix}.kvmeta.json"


def test_padding_rows_of_the_store_are_tagged(samples):
    path = samples / "verl-0.9.1/v1_multi_output/v1.tq_all_before._update_actor.td.pt"
    saved = only(path)
    assert sum(tag is True for tag in saved.arrays["tag.is_padding"]) == 6
    assert saved.meta["partition_id"] == "train"
    keys = only(path.with_name("v1._update_actor.in.kvmeta.json"))
    assert keys.kind == "keys"
    assert list(keys.arrays["store_key"]) == list(saved.arrays["store_key"])


def test_keys_that_do_not_line_up_are_left_alone(samples, tmp_path):
    name = "v1.tq_all_before._update_actor.td.pt"
    folder = samples / "verl-0.9.1/v1_dyn_n"
    (tmp_path / name).write_bytes((folder / name).read_bytes())
    # Keys before balancing: as many, in another order.
    text = (folder / "v1._balance_batch.in.kvmeta.json").read_text()
    (tmp_path / "v1._balance_batch.in.kvmeta.json").write_text(text)
    assert "store_key" not in only(tmp_path / name).arrays


def test_a_folder_comes_in_the_order_of_the_run(samples):
    folder = read_folder(samples / "verl-0.7.1/gae_legacy")
    order = [(s.hint.step, s.hint.stage, s.hint.when) for s in folder.saved]
    assert order == sorted(order, key=lambda o: o[0])
    stages = [stage for step, stage, _ in order if step == 1]
    assert stages.index("rollout") < stages.index("balance") < stages.index("advantage")
    assert stages[-1] == "update_actor"


def test_our_own_files_and_lists_of_batches(tmp_path):
    batch = DataProto.from_dict({"x": torch.arange(6).reshape(3, 2)}, {"u": ["a", "b", "c"]})
    batch.save_to_disk(tmp_path / "f.pkl")
    assert only(tmp_path / "f.pkl").rows == 3
    torch.save(
        [{"x": torch.zeros(2)}, {"y": torch.ones(3, 1), "u": ["a", "b", "c"]}], tmp_path / "l"
    )
    first, second = read_batches(tmp_path / "l")
    assert (first.place, second.place) == ("[0]", "[1]")
    assert list(second.arrays["u"]) == ["a", "b", "c"]
    assert second.label.endswith("l [1]")


@pytest.mark.parametrize("method", ["torch", "numpy"])
def test_values_survive_every_way_of_saving(method, monkeypatch, tmp_path):
    monkeypatch.setenv("VERL_DATAPROTO_SERIALIZATION_METHOD", method)
    rows = [torch.tensor([True, False]), torch.tensor([True, True, False])]
    tensors = {
        "f": torch.tensor([[1.5, float("nan")], [float("inf"), -0.0]]),
        "h": torch.arange(4).reshape(2, 2).to(torch.bfloat16),
        "m": torch.tensor([[True], [False]]),
        "wide": torch.arange(2).reshape(2, 1).expand(2, 5),
        "turned": torch.arange(6).reshape(3, 2).t(),
        "mask": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
    }
    arrays = {"o": [{"t": torch.ones(2)}, None], "n": np.array([1.0, 2.0], ">f4"), "s": ["ä", "b"]}
    batch = DataProto.from_dict(tensors, arrays, {"k": np.int64(3), "l": [1, (2, {"x": 3})]})
    batch.save_to_disk(tmp_path / "f.pkl")
    assert DataProto.load_from_disk(tmp_path / "f.pkl") == batch
    saved = only(tmp_path / "f.pkl")
    for name, tensor in tensors.items():
        pairs = [(saved.tensors[name], tensor)]
        if tensor.is_nested:
            pairs = list(zip(saved.tensors[name].unbind(), rows, strict=True))
        for mine, truth in pairs:
            torch.testing.assert_close(mine, truth, rtol=0, atol=0, equal_nan=True)
    assert saved.meta == batch.meta_info
    assert saved.arrays["n"].tolist() == [1.0, 2.0]


def test_a_batch_of_the_rollout_skip(tmp_path):
    inner = TensorDict({"x": torch.zeros(2, 3)}, batch_size=[2])
    tags = [{"global_steps": 4}, {"global_steps": 5}]
    folder = tmp_path / "7" / "inner"
    folder.mkdir(parents=True)
    torch.save(
        {"tensordict": inner, "keys": ["a_0_0", "a_1_0"], "tags": tags, "global_steps": 7},
        folder / "tq_batch.pt",
    )
    saved = only(folder / "tq_batch.pt")
    assert list(saved.arrays["tag.global_steps"]) == [4, 5]
    assert saved.meta["global_steps"] == 7
    assert (saved.hint.stage, saved.hint.when, saved.hint.step) == ("rollout", "after", 7)


def test_the_older_format_of_torch(tmp_path):
    made = {"x": torch.arange(6.0).reshape(2, 3).t(), "m": torch.tensor([True, False, True])}
    torch.save(made, tmp_path / "f.pt", _use_new_zipfile_serialization=False)
    saved = only(tmp_path / "f.pt")
    assert torch.equal(saved.tensors["x"], made["x"])
    assert torch.equal(saved.tensors["m"], made["m"])


def test_harmless_objects_come_back(tmp_path):
    import collections
    import datetime
    import decimal
    import pathlib
    import uuid

    key = uuid.UUID(int=7)
    meta = {
        "when": datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC),
        "day": datetime.date(2026, 1, 2),
        "took": datetime.timedelta(seconds=3),
        "id": key,
        "cost": decimal.Decimal("1.5"),
        "place": pathlib.PurePosixPath("a/b"),
        "counts": collections.Counter("aab"),
        "lists": collections.defaultdict(list, {"a": [1]}),
        "queue": collections.deque([1, 2], maxlen=3),
        "set": {1, 2},
        "range": range(3),
        "z": 1 + 2j,
        "bytes": bytearray(b"x"),
        "moment": np.datetime64("2026-01-02T03:04:05.000006"),
        "half": np.float16(1.5),
        "dtype": torch.bfloat16,
        (1, "pair"): None,
    }
    for protocol in range(6):
        with (tmp_path / "f.pkl").open("wb") as file:
            pickle.dump({"x": torch.ones(1, 2), "meta": meta}, file, protocol=protocol)
        found = only(tmp_path / "f.pkl").meta["meta"]
        expected = {
            **meta, "place": "a/b", "queue": [1, 2], "counts": {"a": 2, "b": 1}, "lists": {"a": [1]}
        }  # fmt: skip
        assert found == expected


def test_unknown_objects_are_named_and_not_made(tmp_path):
    column = np.array([io.StringIO, Unknown("x")], dtype=object)
    batch = DataProto.from_dict({"x": torch.zeros(2, 1)}, {"c": column}, {"f": Unknown("y")})
    batch.save_to_disk(tmp_path / "f.pkl")
    Unknown.made.clear()
    saved = only(tmp_path / "f.pkl")
    assert Unknown.made == []
    assert [name.rpartition(".")[2] for name in saved.opaque] == ["StringIO", "Unknown"]
    assert repr(saved.arrays["c"][1]).startswith("<opaque ")
    with pytest.raises(UsageError, match="DPA811"):
        DataProto.load_from_disk(tmp_path / "f.pkl")


class Unknown:
    """A class that the readers do not know, which notes when it is brought to life."""

    made: list = []  # noqa: RUF012 - shared on purpose

    def __init__(self, text):
        self.text = text

    def __setstate__(self, state):
        Unknown.made.append(state)


@pytest.mark.parametrize(
    ("name", "data", "fragment"),
    [
        ("f.txt", b"hello", "it is text"),
        ("f.pkl", pickle.dumps(3), "it holds a int and no batch"),
        ("f.pkl", pickle.dumps({"a": 1}), "it holds a dict and no batch"),
        ("f", b"a: 1\n", "neither a pickle nor an archive"),
        ("f.num", b"5\n", "DPA810"),
        ("f.pkl", pickle.dumps({"x": torch.ones(1)}) + b"junk", "4 bytes follow the end"),
        ("f.jsonl", b'{"a": 1}\n[1]\n', "line 2 is a list, not an object"),
        ("f.jsonl", b'{"a": 1}\n{"a": \n', "line 2, column 7"),
        ("f.parquet", b"PAR1xxxx", "DPA810"),
        ("f.npz", b"PK\x05\x06" + b"\0" * 18, "DPA810"),
        ("x.kvmeta.json", b'{"keys": [1], "tags": [{}, {}]}', "2 tags for 1 keys"),
        ("x.kvmeta.json", b"[]", "no list of keys"),
    ],
)
def test_what_is_no_batch_is_explained(name, data, fragment, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError) as caught:
        read_batches(tmp_path / name)
    assert fragment in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_paths_that_are_no_files(tmp_path):
    with pytest.raises(UsageError, match=r"missing cannot be read: No such file"):
        read_batches(tmp_path / "missing")
    with pytest.raises(UsageError, match="holds no file of batches"):
        read_batches(tmp_path)
    (tmp_path / "empty.pkl").touch()
    with pytest.raises(UsageError, match=r"empty \(0 bytes\): its writer failed"):
        read_batches(tmp_path)


@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_a_mapping_of_the_three_parts(how, tmp_path):
    tensors = {"x": torch.arange(6).reshape(3, 2), "y": np.arange(3.0)}
    made = {"batch": tensors, "non_tensor_batch": {"u": np.array(["a", "b", "c"], object)},
            "meta_info": {"global_steps": 4}}  # fmt: skip
    if how == "torch":
        torch.save(made, tmp_path / "f")
    else:
        (tmp_path / "f").write_bytes(pickle.dumps(made))
    saved = only(tmp_path / "f")
    assert set(saved.tensors) == {"x", "y"}
    assert torch.equal(saved.tensors["y"], torch.arange(3, dtype=torch.float64))
    assert list(saved.arrays["u"]) == ["a", "b", "c"]
    assert (saved.meta, saved.hint.step) == ({"global_steps": 4}, 4)


def test_a_path_that_can_be_none(tmp_path):
    with pytest.raises(UsageError, match=r"DPA810 .*File name too long"):
        read_batches(tmp_path / ("x" * 5000))
