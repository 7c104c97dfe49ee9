"""Saved batches that are broken or mean harm: explained in one paragraph, never executed."""

import io
import pickle
import struct
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from dataproto_audit.codes import UsageError
from dataproto_audit.protocol import DataProto

METHOD = "VERL_DATAPROTO_SERIALIZATION_METHOD"


def plain_batch():
    objects = np.empty(2, dtype=object)
    objects[:] = [{"image": torch.rand(2, 3)}, ("a", [1.5])]
    pieces = [torch.arange(2), torch.arange(3)]
    return DataProto.from_dict(
        {
            "ids": torch.arange(6).reshape(2, 3),
            "jagged": torch.nested.as_nested_tensor(pieces, layout=torch.jagged),
        },
        {"o": objects, "u": ["x", "y"], "score": np.arange(2.0)},
        {"temperature": 1.0, "seen": np.int64(7), "size": torch.Size([2])},
    )


def error_of(path):
    try:
        DataProto.load_from_disk(path)
    except UsageError as error:
        return error
    return None


def assert_refused(path, data, fragment):
    path.write_bytes(data)
    text = str(error_of(path))
    assert fragment in text
    assert str(path) in text
    assert "\n" not in text


def archive_of(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def state_of(state, module="verl.protocol"):
    """The pickle of a ``DataProto`` with this state, named without importing it."""
    body = pickle.dumps(state, protocol=4)
    return b"\x80\x04c" + module.encode() + b"\nDataProto\n)\x81" + body[2:-1] + b"b."


class Reduced:
    """Pickles as a call of any importable function, and a state for what it returns."""

    def __init__(self, function, *args, state=None):
        self.reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self):
        return self.reduced


# -- broken ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["torch", "numpy"])
def test_unreadable_files_are_explained(method, monkeypatch, tmp_path):
    monkeypatch.setenv(METHOD, method)
    path = tmp_path / "f"
    with pytest.raises(UsageError, match=r"DPA810 .*missing cannot be read: No such file"):
        DataProto.load_from_disk(tmp_path / "missing")
    with pytest.raises(UsageError, match="Is a directory"):
        DataProto.load_from_disk(tmp_path)
    plain_batch().save_to_disk(path)
    whole = path.read_bytes()
    assert_refused(path, b"", "is empty (0 bytes)")
    assert_refused(path, whole[: len(whole) // 2], "ends in the middle")
    assert_refused(path, b"{'a': 1}", "is no saved DataProto")
    assert_refused(path, pickle.dumps({"a": 1}), "a dict where a DataProto belongs")
    other = pickle.dumps(TensorDict({}, batch_size=[1]))
    assert_refused(path, other, "a TensorDict where a DataProto belongs")
    assert_refused(path, archive_of({"a": 1}), "It looks like an archive of torch.save")
    assert_refused(path, state_of((archive_of([1]), {}, {})), "a list where a TensorDict belongs")
    assert_refused(path, state_of((None, {"a": np.zeros(2), "b": np.zeros(3)}, {})), "'b' has 3")


@given(st.data())
def test_damaged_files_load_or_are_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "f"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(METHOD, data.draw(st.sampled_from(["torch", "numpy"])))
        plain_batch().save_to_disk(path)
    damaged = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(1, len(damaged))) :]
    path.write_bytes(damaged)
    assert "\n" not in str(error_of(path))


def test_fields_and_arrays_must_have_the_length_of_their_shape(tmp_path):
    path = tmp_path / "f"
    function, args, state = np.zeros(3, dtype=object).__reduce__()
    for count in (2, 4):
        lying = (state[0], (count,), *state[2:])
        data = state_of((None, {"a": Reduced(function, *args, state=lying)}, {}))
        assert_refused(path, data, "length of its shape")
    for packed in (
        ("int64", (9,), b""),
        ("int64", (1,), b"1234"),
        ("int64", (2**40,), b"12345678"),
    ):
        data = state_of((((packed[1][0],), None, {"x": packed}), {}, {}))
        assert_refused(path, data, "DPA810")
    good = archive_of(plain_batch().batch.consolidate())
    offsets, far = struct.pack("<3q", 0, 2, 5), struct.pack("<3q", 0, 2, 500)
    assert good.count(offsets) == 1
    assert_refused(path, state_of((good.replace(offsets, far), {}, {})), "DPA810")


def legacy_storage():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about the class that it writes itself
        return torch.zeros(4).storage().__reduce__()


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [(0, (5,), (1,)), (0, (2,), (4,)), (4, (1,), (1,)), (-1, (1,), (1,)), (0, (2,), (-1,))],
)
def test_tensors_cannot_reach_outside_their_storage(offset, size, stride, tmp_path):
    function, args = legacy_storage()
    rest = (offset, size, stride, False, {})
    tensor = Reduced(torch._utils._rebuild_tensor_v2, Reduced(function, *args), *rest)
    assert_refused(tmp_path / "f", state_of((None, {}, {"t": tensor})), "DPA810")


# -- hostile ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [
        pickle.dumps,
        state_of,
        lambda evil: state_of((evil, {}, {})),
        lambda evil: state_of((None, {"a": np.array([evil], dtype=object)}, {})),
        lambda evil: state_of((None, {}, {"a": [evil]}), "dataproto_audit.protocol"),
        lambda evil: state_of(
            (None, {}, {"a": Reduced(torch.storage._load_from_bytes, pickle.dumps(evil))})
        ),
        lambda evil: state_of((pickle.dumps(evil), {}, {})),
        lambda evil: state_of((archive_of(evil), {}, {})),
        lambda evil: state_of(((2,), None, {"x": (evil, (1,), b"")})),
    ],
)
def test_hostile_pickles_execute_nothing(wrap, tmp_path):
    mark = tmp_path / "executed"
    for evil in (Reduced(open, str(mark), "w"), Reduced(eval, f"open({str(mark)!r}, 'w')")):
        assert_refused(tmp_path / "f", wrap(evil), "DPA81")
        assert not mark.exists()


NAME = b"\x80\x04c%s\n%s\n"
DTYPE = b"cnumpy\ndtype\n(U\x02%sI00\nI01\ntR(I3\nU\x01|NNNI-1\nI-1\nI%d\ntb"
PROTO = b"\x80\x04cverl.protocol\nDataProto\n)\x81"
EIGHT = b"C\x08AAAAAAAA"
ARRAY = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntU\x01btR"


@pytest.mark.parametrize(
    ("opcodes", "fragment"),
    [
        (NAME % (b"posix", b"system") + b".", "asks for posix.system"),
        (NAME % (b"builtins", b"getattr") + b".", "asks for builtins.getattr"),
        (b"\x80\x04\x8c\x03a\x1bb\x8c\x03c\nd\x93.", "asks for a b.c d, which"),
        # a state for the class itself, for a function, for a finished value
        (NAME % (b"verl.protocol", b"DataProto") + b"}b.", "for a name (verl.protocol.Data"),
        (NAME % (b"torch._utils", b"_rebuild_tensor_v2") + b"}b.", "a state for a name"),
        (NAME % (b"torch", b"float32") + b"}b.", "a state for a name (torch.float32)"),
        (NAME % (b"builtins", b"int") + b")R.", "a call of builtins.int"),
        # numpy would follow the bytes as pointers if the dtype's flags said "no objects here"
        (ARRAY + b"(I1\n(I1\nt" + DTYPE % (b"O8", 0) + b"I00\nU\x08AAAAAAAAtb.", "its shape"),
        (NAME % (b"numpy", b"dtype") + b"(U\x03V16tR.", "the numpy dtype 'V16'"),
        (NAME % (b"numpy", b"dtype") + b"(U\x02S0tR.", "the numpy dtype 'S0'"),
        (NAME % (b"builtins", b"bytearray") + b"(J\xff\xff\xff\x7ftR.", "not made of bytes"),
        # a bare stand-in, bytes for objects, a structure, an order, arguments of other kinds
        (NAME % (b"torch._utils", b"_rebuild_tensor_v2") + b"}\x86.", "asks for torch._utils"),
        (PROTO + NAME % (b"builtins", b"int") + b"N}\x87b.", "a builtins.int where tensors"),
        (
            NAME % (b"numpy.core.multiarray", b"scalar")
            + b"("
            + DTYPE % (b"O8", 0)
            + EIGHT
            + b"tR.",
            "object given as bytes",
        ),
        (NAME % (b"numpy.core.multiarray", b"scalar") + b"(N" + EIGHT + b"tR.", "without a dtype"),
        (NAME % (b"numpy", b"dtype") + b"(U\x02i8tR(I3\nU\x01|(tNNtb.", "a structured numpy dtype"),
        (NAME % (b"numpy.core.numeric", b"_frombuffer") + b"(NN(tU\x01KtR.", "that does not exist"),
        (NAME % (b"torch._utils", b"_rebuild_tensor_v2") + b"(NI0\n(t(ttR.", "without a storage"),
        (b"\x80\x02\x82\x01.", "the opcode EXT1"),  # copyreg's extensions
        (b"\x80\x02Pid\n.", "the opcode PERSID"),
        (b"\x80\x02Nr\xff\xff\xff\x7f.", "a NoneType where"),  # a memo slot far away costs nothing
    ],
)
def test_hostile_opcodes(opcodes, fragment, tmp_path):
    assert_refused(tmp_path / "f", opcodes, fragment)


def test_deep_nesting_is_refused(tmp_path):
    deep = b"\x80\x02" + b"]" * 100000 + b"a" * 99999 + b"."
    body = b"\x80\x04cverl.protocol\nDataProto\n)\x81N}" + deep[2:-1] + b"\x87b."
    assert_refused(tmp_path / "f", body, "deeper than")
