"""Files that are broken or mean harm: read or explained, and never executed."""

import gzip
import io
import json
import os
import pickle
import struct
import sys
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from dataproto_audit._protocol.safe.load import NAMES
from dataproto_audit.batch import BatchView
from dataproto_audit.codes import UsageError
from dataproto_audit.dump.readers import read_batches

# What no reader may do, whatever the file says: start Python's own unpickler, a process, a socket.
_FORBIDDEN = (
    "pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen",
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.putenv", "socket.connect",
)  # fmt: skip
_watch = {"on": False, "seen": []}


def _hook(event, _):
    if _watch["on"] and event in _FORBIDDEN:
        _watch["seen"].append(event)


sys.addaudithook(_hook)


def read(path):
    """Batches of a file, or the error for users; anything else fails the test."""
    _watch.update(on=True, seen=[])
    try:
        return read_batches(path)
    except UsageError as error:
        return error
    finally:
        _watch["on"] = False
        assert _watch["seen"] == []


def assert_refused(path, data, fragment, code=None):
    path.write_bytes(data)
    error = read(path)
    assert isinstance(error, UsageError), error
    assert fragment in str(error)
    assert str(path) in str(error)
    assert "\n" not in str(error)
    assert error.remedy
    if code:
        assert error.code == code


def archive(pickled, members=None):
    """An archive as torch.save writes it, around any pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as file:
        for name, data in {"data.pkl": pickled, "byteorder": b"little", **(members or {})}.items():
            file.writestr(f"a/{name}", data)
    return buffer.getvalue()


def proto(state):
    """The pickle of verl's DataProto with this state, named without importing it."""
    body = pickle.dumps(state, protocol=4)
    return b"\x80\x04cverl.protocol\nDataProto\n)\x81" + body[2:-1] + b"b."


class Call:
    """Pickles as a call of any importable function."""

    def __init__(self, function, *args):
        self.reduced = (function, args)

    def __reduce__(self):
        return self.reduced


# -- code ------------------------------------------------------------------------------------------


def _wraps():
    yield lambda evil: pickle.dumps(evil)
    yield lambda evil: pickle.dumps([evil], protocol=0)
    yield lambda evil: pickle.dumps({"x": torch.zeros(2), "y": evil}, protocol=2)
    yield lambda evil: proto((None, {"c": np.array([evil, 1], dtype=object)}, {}))
    yield lambda evil: proto((None, {}, {"m": {"deep": [evil]}}))
    yield lambda evil: proto((pickle.dumps(evil), {}, {}))
    yield lambda evil: proto((archive(pickle.dumps(evil, protocol=2)), {}, {}))
    yield lambda evil: archive(pickle.dumps({"x": evil}, protocol=2))
    yield lambda evil: proto((None, {}, {"t": Call(torch.storage._load_from_bytes, evil)}))
    yield lambda evil: proto(
        (None, {}, {"t": Call(torch.storage._load_from_bytes, pickle.dumps(evil))})
    )
    # made, and thrown away again, so that no value shows it
    yield lambda evil: b"\x80\x02" + pickle.dumps(evil, protocol=2)[2:-1] + b"0N."


@pytest.mark.parametrize("wrap", list(_wraps()))
def test_calls_are_refused_by_name(wrap, tmp_path):
    mark = tmp_path / "executed"
    text = f"open({str(mark)!r}, 'w')"
    for function, *args in (
        (os.system, f"touch {mark}"),
        (eval, text),
        (exec, text),
        (open, str(mark), "w"),
        (getattr, "x", "upper"),
        (__import__, "os"),
        (torch.load, str(mark)),
        (np.load, str(mark)),
        (type, "X", (), {}),
        (map, eval, [text]),
    ):
        assert_refused(tmp_path / "f", wrap(Call(function, *args)), "DPA81")
        assert not mark.exists()


@pytest.mark.parametrize(
    ("data", "fragment"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", "a call of os.system"),
        (b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.", "a call of posix.system"),
        (b"\x80\x02cbuiltins\nint\n(K\x01tR.", "a call of builtins.int"),
        (b"\x80\x02K\x01)R.", "a call of a int"),
        (b"\x80\x02\x82\x01.", "the opcode EXT1"),
        (b"\x80\x02K\x01Q.", "the opcode BINPERSID"),
        (b"\x80\x05\x97.", "the opcode NEXT_BUFFER"),
        (b"\x80\x02}K\x01a.", "an append to a dict"),
        (b"\x80\x02]K\x01K\x02s.", "an item for a list"),
        (b"\x80\x02]}b.", "a state for a list"),
        (b"\x80\x02cx\nY\n)\x81}b}b.", "a second state for x.Y"),
        (b"\x80\x02K\x01)\x81.", "an instance of a int"),
        (b"\x80\x04K\x01K\x02\x93.", "a name that is no text"),
        (b"\x80\x02ccollections\nOrderedDict\n)Rcbuiltins\ndict\ns.", "DPA81"),
    ],
)
def test_opcodes_that_batches_do_not_need(data, fragment, tmp_path):
    assert_refused(tmp_path / "f.pkl", data, fragment)


# -- claims ----------------------------------------------------------------------------------------

STORAGE = (
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpu%btQ%b%b%b\x89}tR."
)


def tensor_pickle(count, offset=b"K\x00", size=b"K\x04\x85", stride=b"K\x01\x85"):
    body = STORAGE.replace(b"(X\x07", b"((X\x07", 1) % (count, offset, size, stride)
    return b"\x80\x02}X\x01\x00\x00\x00x" + body[2:-1] + b"s."


HUGE = b"\x8a\x07" + struct.pack("<q", 10**13)[:7]


def test_the_tensor_itself_is_read(tmp_path):
    data = np.arange(4, dtype=np.float32).tobytes()
    (tmp_path / "f.pt").write_bytes(archive(tensor_pickle(b"K\x04"), {"data/0": data}))
    (saved,) = read(tmp_path / "f.pt")
    assert saved.tensors["x"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("pickled", "fragment", "code"),
    [
        (tensor_pickle(HUGE), "a storage claims 40000000000000 bytes and has 16", "DPA812"),
        (tensor_pickle(b"K\x04", size=HUGE + b"\x85"), "a tensor of shape [10000", "DPA812"),
        (
            tensor_pickle(b"K\x04", size=HUGE + b"\x85", stride=b"K\x00\x85"),
            "claims 40000000000000 bytes",
            "DPA812",
        ),
        (tensor_pickle(b"K\x04", size=b"K\x05\x85"), "outside its storage", "DPA810"),
        (tensor_pickle(b"K\x04", stride=b"K\x02\x85"), "outside its storage", "DPA810"),
        (tensor_pickle(b"K\x04", stride=b"J\xff\xff\xff\xff\x85"), "no list of sizes", "DPA810"),
        (tensor_pickle(b"K\x04", offset=b"K\x01"), "outside its storage", "DPA810"),
        (tensor_pickle(b"K\x04", size=b"K\x02K\x02\x86"), "do not fit together", "DPA810"),
        (tensor_pickle(b"J\xff\xff\xff\xff"), "negative or broken size", "DPA810"),
    ],
)
def test_tensors_that_claim_more_than_their_storage(pickled, fragment, code, tmp_path):
    data = archive(pickled, {"data/0": bytes(16)})
    assert_refused(tmp_path / "f.pt", data, fragment, code)


def test_archives_that_claim_more_than_they_hold(tmp_path):
    path = tmp_path / "f.pt"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/data.pkl", tensor_pickle(b"K\x04"))
        file.writestr("a/data/0", bytes(10**7))
    assert_refused(path, buffer.getvalue(), "claim more bytes than the archive", "DPA812")
    good = archive(tensor_pickle(b"K\x04"), {"data/0": bytes(16)})
    assert_refused(path, good.replace(b"little", b"bigger"), "DPA810")
    assert_refused(path, archive(tensor_pickle(b"K\x04")), "a part of the archive is missing")
    assert_refused(path, archive(b"\x80\x02N.", {"x/data.pkl": b""}), "torch.save did not write")


def nested(depth):
    return b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."


def doubled(levels):
    """A list that holds one twice that holds one twice ... : 2**levels values in few bytes."""
    steps = (b"0](h%ch%ceq%c" % (i, i, i + 1) for i in range(levels))
    return b"\x80\x02]q\x00" + b"".join(steps) + b"."


@pytest.mark.parametrize(
    ("data", "fragment", "code"),
    [
        (nested(10**5), "nest deeper than 100", "DPA812"),
        (b"\x80\x02" + b"(" * 10**5 + b"t" * 10**5 + b".", "nest deeper", "DPA812"),
        (doubled(60), "unfold to far more", "DPA812"),
        (b"\x80\x02]q\x00h\x00a.", "contains itself", "DPA811"),
        (b"\x80\x02}q\x00K\x01h\x00s.", "contains itself", "DPA811"),
        # a chain whose links come first, so that no single walk is deep
        (
            b"\x80\x02](]q\x00" + b"".join(
                b"]h%caq%c" % (i, i + 1) for i in range(200)
            ) + b"e.",
            "nest deeper", "DPA812",
        ),
        (b"\x80\x02}(\x8a\x10" + b"\x7f" * 16 + b"Nu.", "beyond 61 bits", "DPA811"),
        (b"\x80\x02}(]Nu.", "a dictionary key of type list", "DPA811"),
        (b"\x80\x02}(K\x01\x85\x85Nu.", "a dictionary key of type tuple", "DPA811"),
        (
            b"\x80\x02cbuiltins\nlist\n(cbuiltins\nrange\n(" + HUGE + b"tRtR.",
            "builtins.list of a range", "DPA811",
        ),
    ],
)  # fmt: skip
def test_values_out_of_proportion(data, fragment, code, tmp_path):
    assert_refused(tmp_path / "f.pkl", data, fragment, code)


def test_text_that_repeats_itself_a_million_times(tmp_path, monkeypatch):
    monkeypatch.setenv("DATAPROTO_AUDIT_CONFINE", "off")  # a socket leads to the child process
    data = b"\x80\x02](X" + struct.pack("<I", 10**6) + b"a" * 10**6 + b"q\x00"
    assert_refused(tmp_path / "f", data + b"h\x00" * 10**6 + b"e.", "unfold to", "DPA812")


def test_fields_that_repeat_the_same_bytes(tmp_path):
    good = TensorDict({"x": torch.zeros(1 << 20, dtype=torch.uint8)}, batch_size=[1 << 20])
    buffer = io.BytesIO()
    metadata = {
        "cls": "TensorDict", "non_tensors": {}, "cls_metadata": {"batch_size": [1 << 20]},
        "leaves": {str(i): ("torch.bool", [1 << 20], 0, 1 << 20, 0) for i in range(400)},
    }  # fmt: skip
    import tensordict._reductions as reductions

    function = reductions._rebuild_tensordict_files_consolidated
    torch.save(Call(function, metadata, good["x"]), buffer)
    assert_refused(tmp_path / "f", buffer.getvalue(), "a field of a TensorDict claims", "DPA812")


def test_text_files_out_of_proportion(tmp_path):
    line = json.dumps({"a": "x" * 1000}).encode() + b"\n"
    assert_refused(tmp_path / "f.jsonl.gz", gzip.compress(line * 10**5), "unpacks to", "DPA812")
    assert_refused(tmp_path / "f.jsonl.gz", gzip.compress(line)[:-9], "ends in the middle")
    deep = b'{"a": ' + b"[" * 10**5 + b"]" * 10**5 + b"}"
    assert_refused(tmp_path / "f.jsonl", deep, "DPA810")
    assert_refused(tmp_path / "f.jsonl", b'{"a": ' + b"9" * 10**5 + b"}", "DPA810")
    table = pa.table({"a": pa.array(["x" * 1000] * 10**5)})
    pq.write_table(table, tmp_path / "f.parquet")
    small = (tmp_path / "f.parquet").read_bytes()
    assert len(small) < 10**5
    assert_refused(tmp_path / "f.parquet", small, "unpack to", "DPA812")


# -- numpy and jagged ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "args", "state", "fragment"),
    [
        (np.zeros(3).__reduce__()[0], np.zeros(3).__reduce__()[1], None, "without content"),
        (*np.zeros(3).__reduce__()[:2], (1, (9,), np.dtype("f8"), False, bytes(24)), "their shape"),
        (*np.zeros(3).__reduce__()[:2], (1, (10**13,), np.dtype("f8"), False, b""), "their shape"),
        (*np.zeros(3).__reduce__()[:2], (1, (1,), np.dtype("O"), False, bytes(8)), "its shape"),
        (*np.zeros(3).__reduce__()[:2], (1, (1,), np.dtype("U1"), False, b"\xff" * 4), "letters"),
        (*np.zeros(3).__reduce__()[:2], (1, (1,), np.dtype("i4,i4"), False, bytes(8)), "dtype"),
        (*np.zeros(3).__reduce__()[:2], (1, (-1,), np.dtype("f8"), False, b""), "list of sizes"),
    ],
)
def test_arrays_that_lie(function, args, state, fragment, tmp_path):
    class Array:
        def __reduce__(self):
            return (function, args) if state is None else (function, args, state)

    fragment = fragment.replace("their shape", "the length of its shape")
    assert_refused(tmp_path / "f", proto((None, {"a": Array()}, {})), fragment)


def test_columns_that_are_no_columns(tmp_path):
    assert_refused(tmp_path / "f", proto((None, {"a": 3}, {})), "'a' is a int, not an array")
    assert_refused(tmp_path / "f", proto((3, {}, {})), "a int where tensors belong")
    assert_refused(tmp_path / "f", proto(3), "DPA810")


@pytest.mark.parametrize("offsets", [[0, 2, 99], [0, 5, 2], [1, 2, 5], [0, 2, 4], [-1, 2, 5]])
def test_jagged_fields_reach_no_further_than_their_values(offsets, tmp_path):
    rows = [torch.arange(2), torch.arange(3)]
    field = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    buffer = io.BytesIO()
    torch.save({"x": field}, buffer)
    with zipfile.ZipFile(buffer) as file:
        members = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    good, bad = struct.pack("<3q", 0, 2, 5), struct.pack("<3q", *offsets)
    assert sum(data == good for data in members.values()) == 1
    changed = {name: bad if data == good else data for name, data in members.items()}
    pickled = changed.pop("data.pkl")
    assert_refused(tmp_path / "f.pt", archive(pickled, changed), "a jagged field", "DPA810")


def test_bytes_of_bools_are_made_true_or_false(tmp_path):
    body = tensor_pickle(b"K\x04").replace(b"FloatStorage", b"BoolStorage")
    (tmp_path / "f").write_bytes(archive(body, {"data/0": b"\x00\x01\x02\xff"}))
    (saved,) = read(tmp_path / "f")
    assert saved.tensors["x"].view(torch.uint8).tolist() == [0, 1, 1, 1]


# -- fuzz ------------------------------------------------------------------------------------------

GOOD = (
    "verl-0.7.1/files_torch/plain.pkl",
    "verl-0.9.1/files_numpy/jagged.pkl",
    "verl-0.9.1/files_torch/td_nopad_torchsave.pt",
    "verl-0.9.1/files_torch/td_nopad_pickle.pt",
    "verl-0.7.1/files_numpy/td_pickle.pt",
    "openrlhf/healthy/experiences.pt",
    "slime/healthy/rollout_data/0.pt",
    "areal/healthy/rollout/3/0.jsonl",
    "nemo_rl/healthy/train_data_step1.jsonl",
    "prime_rl/healthy/rollouts/step_1/train/effective/traces.jsonl",
    "verl-0.9.1/v1_colocate_async/v1._update_actor.in.kvmeta.json",
    "verl-0.9.1/v1_colocate_async/stages.jsonl.gz",
    "trl/healthy/completions/completions_00002.parquet",
)


def damage(data, draw):
    """Bytes set, cut out, repeated, or cut off."""
    out = bytearray(data)
    for _ in range(draw(st.integers(1, 6))):
        place = draw(st.integers(0, max(0, len(out) - 1)))
        kind = draw(st.sampled_from(("set", "set", "set", "remove", "repeat", "cut")))
        length = draw(st.integers(1, 8))
        if kind == "set":
            out[place : place + 1] = bytes([draw(st.integers(0, 255))])
        elif kind == "remove":
            del out[place : place + length]
        elif kind == "repeat":
            out[place:place] = out[place : place + length]
        else:
            del out[place:]
    return bytes(out)


def assert_reads_or_explains(path):
    found = read(path)
    if isinstance(found, UsageError):
        assert "\n" not in str(found)
        assert str(path) in str(found)
        return
    for saved in found:
        view = BatchView.of(saved.batch)
        assert view.rows >= 0
        for name in saved.tensors:
            assert view.numpy(name) is not None


@pytest.mark.parametrize("name", GOOD)
@given(data=st.data())
def test_damaged_files_are_read_or_explained(name, samples, tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / name.rpartition("/")[2]
    path.write_bytes(damage((samples / name).read_bytes(), data.draw))
    assert_reads_or_explains(path)


@pytest.mark.parametrize("name", [name for name in GOOD if name.endswith((".pt", ".pkl"))])
@given(data=st.data())
def test_damaged_pickles_in_sound_archives(name, samples, tmp_path_factory, data):
    """Damage behind the checksums: in the pickle of an archive, which is packed again."""
    whole = (samples / name).read_bytes()
    start = whole.find(b"PK\x03\x04")
    if start < 0:
        damaged = damage(whole, data.draw)
    else:
        end = whole.rfind(b"PK\x05\x06") + 22
        with zipfile.ZipFile(io.BytesIO(whole[start:end])) as file:
            members = {n.partition("/")[2]: file.read(n) for n in file.namelist()}
        pickled = damage(members.pop("data.pkl"), data.draw)
        damaged = archive(pickled, members)
        if start:
            damaged = proto((damaged, {}, {}))
    path = tmp_path_factory.mktemp("damaged") / "f"
    path.write_bytes(damaged)
    assert_reads_or_explains(path)


@given(
    st.binary(max_size=60), st.sampled_from((b"", b"\x80\x02", b"\x80\x04", b"PK\x03\x04", b"{"))
)
def test_noise_is_explained(tmp_path_factory, noise, start):
    path = tmp_path_factory.mktemp("noise") / "f"
    path.write_bytes(start + noise)
    assert_reads_or_explains(path)


_NAMES = [
    b"c%s\n%s\n" % (known.module.encode(), known.name.encode())
    for known in (*NAMES.calls, *NAMES.instances, *list(NAMES.constants)[:6])
]
_PIECES = [
    b"(", b"t", b"l", b"d", b"]", b"}", b")", b"\x85", b"\x86", b"\x87", b"a", b"e", b"s", b"u",
    b"R", b"R", b"R", b"\x81", b"b", b"b", b"0", b"1", b"2", b"N", b"\x88", b"K\x00", b"K\x01",
    b"K\x04", b"J\xff\xff\xff\xff", HUGE, b"G" + bytes(8), b"U\x02i8", b"U\x02O8", b"U\x01x",
    b"C\x08" + bytes(8), b"X\x04\x00\x00\x00data", b"X\x0b\x00\x00\x00_batch_size", b"q\x00",
    b"h\x00", b"\x94", b"\x8f", b"(\x91", b"\x90", b"X\x06\x00\x00\x00values",
]  # fmt: skip


@given(st.lists(st.sampled_from(_PIECES + _NAMES), max_size=40), st.booleans())
def test_any_order_of_opcodes_and_known_names(tmp_path_factory, pieces, packed):
    """Known names with arguments they were not made for, as no writer would put them."""
    body = b"\x80\x04" + b"".join(pieces) + b"."
    path = tmp_path_factory.mktemp("opcodes") / "f"
    path.write_bytes(archive(body) if packed else body)
    assert_reads_or_explains(path)


@given(st.sampled_from(_NAMES), st.sampled_from(_NAMES), st.data())
def test_known_names_with_any_arguments(tmp_path_factory, name, other, data):
    plain = st.recursive(
        st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats()
        | st.text(max_size=4) | st.binary(max_size=9),
        lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    )  # fmt: skip
    args, state = data.draw(st.lists(plain, max_size=7)), data.draw(plain)

    def body(value):
        return pickle.dumps(value, protocol=2)[2:-1]

    first = data.draw(st.sampled_from((b"", other, other + b")R", other + b")\x81")))
    made = name + b"(" + first + b"".join(map(body, args)) + b"t"
    made += data.draw(st.sampled_from((b"R", b"\x81")))
    made += data.draw(st.sampled_from((b"", body(state) + b"b")))
    path = tmp_path_factory.mktemp("arguments") / "f"
    path.write_bytes(b"\x80\x02}X\x01\x00\x00\x00x" + made + b"s.")
    assert_reads_or_explains(path)
