"""Pickles that try to run something, one for each technique: nothing runs, whatever is read."""

import gzip
import io
import pickle
import struct
import sys
import zipfile

import pytest
import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.dump.readers import read_batches

MARK = "mark_of_malice"
_watch = {"on": False, "seen": []}


def _hook(event, args):
    if _watch["on"] and event.startswith((
        "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.remove", "os.rename", "os.putenv",
        "subprocess", "socket", "pickle.find_class", "exec", "ctypes", "shutil", "webbrowser",
    )):  # fmt: skip
        if event == "exec" and not getattr(args[0], "co_filename", "<").startswith("<"):
            return  # a module of Python's own is imported
        _watch["seen"].append((event, str(args)[:100]))


sys.addaudithook(_hook)


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def name(module, attribute):
    return f"c{module}\n{attribute}\n".encode()


def call(module, attribute, *args):
    """REDUCE of a name on constant arguments."""
    return name(module, attribute) + b"(" + b"".join(map(text, args)) + b"tR"


def plain(body):
    return b"\x80\x04" + body + b"."


def archive(body, **members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as file:
        for member, data in {"data.pkl": plain(body), "byteorder": b"little", **members}.items():
            file.writestr(f"a/{member}", data)
    return buffer.getvalue()


def proto(batch=b"N", arrays=b"}", meta=b"}"):
    return plain(b"cverl.protocol\nDataProto\n)\x81(" + batch + arrays + meta + b"tb")


def as_bytes(data):
    return b"B" + struct.pack("<I", len(data)) + data


COMMAND = f"touch {MARK}"
SYSTEM = call("os", "system", COMMAND)
CODE = f"__import__('pathlib').Path({MARK!r}).touch()"
ENTRY = b"}" + text("x")  # a dictionary, and the key of what comes next


def in_dict(body):
    return plain(ENTRY + body + b"s")


CORPUS = {
    # calls
    "system": plain(SYSTEM),
    "system, protocol 0": b"cos\nsystem\n(S'" + COMMAND.encode() + b"'\ntR.",
    "posix": plain(call("posix", "system", COMMAND)),
    "nt": plain(call("nt", "system", COMMAND)),
    "popen": plain(call("os", "popen", COMMAND)),
    "subprocess": plain(call("subprocess", "check_output", COMMAND)),
    "eval": plain(call("builtins", "eval", CODE)),
    "exec": plain(call("builtins", "exec", CODE)),
    "python 2 names": plain(call("__builtin__", "eval", CODE)),
    "compile and exec": plain(name("builtins", "exec") + b"(" + call("builtins", "compile", CODE,
                              "x", "exec") + b"tR"),
    "import": plain(call("builtins", "__import__", "antigravity")),
    "importlib": plain(call("importlib", "import_module", "antigravity")),
    "getattr of a module": plain(name("builtins", "getattr") + b"(" + name("os", "path")
                                 + text("join") + b"tR"),
    "stack global": plain(text("os") + text("system") + b"\x93(" + text(COMMAND) + b"tR"),
    "a dotted name": plain(text("builtins") + text("object.__subclasses__") + b"\x93)R"),
    "a name that was memoized": plain(name("os", "system") + b"q\x000h\x00(" + text(COMMAND)
                                      + b"tR"),
    "thrown away": plain(SYSTEM + b"0N"),
    "behind a batch": in_dict(b"N")[:-1] + SYSTEM + b"0.",
    "pickle in pickle": plain(name("pickle", "loads") + b"(" + as_bytes(plain(SYSTEM)) + b"tR"),
    "marshal": plain(name("marshal", "loads") + b"(" + as_bytes(b"c") + b"tR"),
    "code of a function": plain(name("types", "FunctionType") + b"(N}tR"),
    "cloudpickle": plain(name("cloudpickle.cloudpickle", "_make_function") + b"(NNNNNtR"),
    "dill": plain(name("dill._dill", "_create_function") + b"(NNtR"),
    "joblib": plain(call("joblib.numpy_pickle", "load", MARK)),
    "partial": plain(name("functools", "partial") + b"(" + name("os", "system") + text(COMMAND)
                     + b"tR"),
    "methodcaller": plain(call("operator", "methodcaller", "system", COMMAND)),
    "attrgetter": plain(call("operator", "attrgetter", "system")),
    "map": plain(name("builtins", "map") + b"(" + name("os", "system") + b"(" + text(COMMAND)
                 + b"ltR"),
    "timeit": plain(call("timeit", "timeit", CODE)),
    "web": plain(call("webbrowser", "open", "file:///x")),
    "ctypes": plain(call("ctypes", "CDLL", "libc.so.6")),
    "remove": plain(call("shutil", "rmtree", MARK)),
    # objects
    "inst": plain(b"(" + text(COMMAND) + b"ios\nsystem\n"),
    "obj": plain(b"(" + name("os", "system") + text(COMMAND) + b"o"),
    "newobj": in_dict(name("subprocess", "Popen") + b"(" + text(COMMAND) + b"t\x81"),
    "newobj with names": in_dict(name("subprocess", "Popen") + b")}" + text("args")
                                 + text(COMMAND) + b"s\x92"),
    "reconstructor": plain(name("copyreg", "_reconstructor") + b"(" + name("os", "system")
                           + name("builtins", "object") + b"NtR"),
    "copyreg newobj": plain(name("copyreg", "__newobj__") + b"(" + name("subprocess", "Popen")
                            + text(COMMAND) + b"tR"),
    "state of an instance": in_dict(name("logging", "Handler") + b")\x81}" + text("__class__")
                                    + name("os", "system") + b"sb"),
    "slots of a state": in_dict(name("collections", "OrderedDict") + b")R(N}"
                                + text("__reduce__") + name("os", "system") + b"stb"),
    "default factory": in_dict(name("collections", "defaultdict") + b"(" + name("os", "system")
                               + b"tR"),
    "append to an instance": in_dict(name("os", "environ") + b"(" + text("x") + b"e"),
    "setitem of an instance": in_dict(name("os", "environ") + text("PATH") + text("/x") + b"s"),
    "extension registry": plain(b"\x82\x01"),
    "out of band buffer": plain(b"\x97"),
    "persistent id": plain(b"(" + text("storage") + name("os", "system") + text("0") + text("cpu")
                           + b"K\x01tQ"),
    "persistent id of text": b"P" + COMMAND.encode() + b"\n.",
    # inside of what batches are made of
    "object array": in_dict(name("numpy._core.multiarray", "_reconstruct") + b"("
                            + name("numpy", "ndarray") + b"(K\x00tC\x01btR(K\x01(K\x01t"
                            + name("numpy", "dtype") + b"(" + text("O8") + b"\x89\x88tR\x89]"
                            + SYSTEM + b"atb"),
    "object scalar": in_dict(name("numpy._core.multiarray", "scalar") + b"("
                             + name("numpy", "dtype") + b"(" + text("O8") + b"\x89\x88tR"
                             + as_bytes(plain(SYSTEM)) + b"tR"),
    "object from a buffer": in_dict(name("numpy._core.numeric", "_frombuffer") + b"("
                                    + as_bytes(bytes(8)) + name("numpy", "dtype") + b"("
                                    + text("O8") + b"\x89\x88tR(K\x01t" + text("C") + b"tR"),
    "dtype with metadata": in_dict(name("numpy", "dtype") + b"(" + text("V8") + b"\x89\x88tR(K\x03"
                                   + text("<") + b"N(" + SYSTEM + b"t}K\x08K\x01K\x00tb"),
    "numpy load": plain(call("numpy", "load", MARK)),
    "torch load": plain(call("torch", "load", MARK)),
    "torch hub": plain(call("torch.hub", "load", MARK, "x")),
    "type of a tensor": in_dict(name("torch._tensor", "_rebuild_from_type_v2") + b"("
                                + name("os", "system") + name("torch", "Tensor") + b"("
                                + text(COMMAND) + b"t}tR"),
    "bytes of a storage": in_dict(name("torch.storage", "_load_from_bytes") + b"("
                                  + as_bytes(plain(SYSTEM)) + b"tR"),
    "archive of a storage": in_dict(name("torch.storage", "_load_from_bytes") + b"("
                                    + as_bytes(archive(SYSTEM)) + b"tR"),
    "archive": archive(SYSTEM),
    "archive, in a value": archive(ENTRY + SYSTEM + b"s"),
    "archive, code beside it": archive(b"N", **{"code/__torch__.py": CODE.encode(),
                                                "constants.pkl": plain(SYSTEM)}),
    "archive in an archive": archive(ENTRY + as_bytes(archive(SYSTEM)) + b"s"),
    "batch of a DataProto": proto(batch=as_bytes(archive(SYSTEM))),
    "pickle in a DataProto": proto(batch=as_bytes(plain(SYSTEM))),
    "column of a DataProto": proto(arrays=ENTRY + SYSTEM + b"s"),
    "meta of a DataProto": proto(meta=ENTRY + b"]" + SYSTEM + b"as"),
    "non-tensor data": in_dict(name("tensordict.tensorclass", "NonTensorData") + b")\x81}"
                               + text("data") + SYSTEM + b"sb"),
    "experience": in_dict(name("openrlhf.trainer.ppo_utils.experience", "Experience") + b")\x81}"
                          + text("sequences") + SYSTEM + b"sb"),
    "gzipped": gzip.compress(plain(SYSTEM)),
    "legacy archive": pickle.dumps(0x1950A86A20F9469CFC6C, 2) + plain(SYSTEM),
}  # fmt: skip


@pytest.mark.parametrize("technique", list(CORPUS))
@pytest.mark.parametrize("suffix", ["pkl", "pt"])
def test_nothing_runs(technique, suffix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"evil.{suffix}"
    path.write_bytes(CORPUS[technique])
    loaded = set(sys.modules)
    _watch.update(on=True, seen=[])
    try:
        found = read_batches(path)
    except UsageError as error:
        found = error
    finally:
        _watch["on"] = False
    assert _watch["seen"] == []
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert not {"antigravity", "cloudpickle", "dill"} & (set(sys.modules) - loaded)
    if isinstance(found, UsageError):
        assert found.code in ("DPA810", "DPA811", "DPA812")
        assert "\n" not in str(found)
    else:  # what is unknown is named, and inert
        assert all(saved.opaque for saved in found)


def test_there_are_enough_techniques():
    assert len(CORPUS) >= 40
    assert len(set(CORPUS.values())) == len(CORPUS)


def test_python_itself_would_run_them(tmp_path, monkeypatch):
    """The corpus is no straw man: what the plain ones do when they are unpickled."""
    monkeypatch.chdir(tmp_path)
    for technique in ("system", "eval", "stack global", "inst", "object array"):
        pickle.loads(CORPUS[technique])
        assert (tmp_path / MARK).exists(), technique
        (tmp_path / MARK).unlink()


def test_unknown_instances_in_a_batch_are_inert_and_listed(tmp_path):
    body = pickle.dumps({"old_log_probs": [1]}, 2)[2:-1]
    evil = name("subprocess", "Popen") + b"(" + text(COMMAND) + b"t\x81"
    (tmp_path / "b.pkl").write_bytes(plain(body + text("handle") + evil + b"s"))
    with pytest.raises(UsageError, match="DPA810"):
        read_batches(tmp_path / "b.pkl")
    torch.save({"old_log_probs": torch.zeros(2, 3)}, tmp_path / "good.pt")
    with zipfile.ZipFile(tmp_path / "good.pt") as file:
        members = {n.partition("/")[2]: file.read(n) for n in file.namelist()}
    body = members.pop("data.pkl")
    members = {n: d for n, d in members.items() if n != "byteorder"}
    (tmp_path / "e.pt").write_bytes(archive(body[2:-1] + text("handle") + evil + b"s", **members))
    [saved] = read_batches(tmp_path / "e.pt")
    assert saved.opaque == ("subprocess.Popen",)
    assert "subprocess.Popen" in repr(saved.meta["handle"])
