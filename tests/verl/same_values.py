"""Run inside verl's environment: files as verl's own loader reads them, and as ours do.

python same_values.py --make FOLDER       write one file of each kind with verl's DataProto
python same_values.py FOLDER [FOLDER ...] compare every file; the counts as JSON on stdout
"""

import json
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl import DataProto

SUFFIXES = (".pkl", ".pt", ".dp")
METHOD = "VERL_DATAPROTO_SERIALIZATION_METHOD"


def make(folder):
    """One file of each kind: both serialisations, plain, jagged, sliced, without a batch, empty."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    tensors = {
        "responses": torch.randint(0, 9, (4, 3)), "mask": torch.ones(4, 3, dtype=torch.bool),
        "old_log_probs": torch.randn(4, 3), "scores": torch.randn(4, 3).double(),
        "not_finite": torch.tensor([[float("nan")], [float("inf")], [-0.0], [1.0]]),
    }  # fmt: skip
    objects = {
        "uid": np.array(list("aabb"), dtype=object), "number": np.arange(4),
        "text": np.array([{"a": [1, (2.5, None)]}, "x", b"y", 3], dtype=object),
    }  # fmt: skip
    rows = [torch.arange(n) for n in (3, 1, 2, 4)]
    jagged = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    for method in ("numpy", "torch"):
        os.environ[METHOD] = method
        plain = DataProto.from_dict(tensors, objects, meta_info={"temperature": 0.5, "n": [1, 2]})
        files = {
            "plain": plain, "sliced": plain[1:3], "no_batch": DataProto(meta_info={"a": 1}),
            "arrays": DataProto(non_tensor_batch=dict(objects)),
        }  # fmt: skip
        if method == "torch":
            half = {"half": torch.randn(4, 3).to(torch.bfloat16)}
            files["half"] = DataProto.from_dict(half)
            files["jagged"] = DataProto(batch=TensorDict({"ids": jagged}, batch_size=[4]))
        for name, data in files.items():
            data.save_to_disk(folder / f"{name}_{method}.pkl")
    saved = TensorDict({"ids": jagged, "old_log_probs": tensors["old_log_probs"]}, batch_size=[4])
    torch.save(saved, folder / "store.td.pt")


def loaded(path):
    """By verl's loader, which must be told by the environment how the file was written."""
    for method in ("torch", "numpy"):
        os.environ[METHOD] = method
        try:
            return DataProto.load_from_disk(path)
        except (TypeError, EOFError):  # the bytes of the other method
            if method == "numpy":
                raise
    raise AssertionError


def theirs(path):
    """What verl (or torch, for files that are no DataProto) makes of a file of its own."""
    if path.suffix == ".pt":
        data = path.read_bytes()
        data = torch.load(path, weights_only=False) if data[:2] == b"PK" else pickle.loads(data)
        if isinstance(data, dict) and isinstance(data.get("tensordict"), TensorDict):
            data = data["tensordict"]
    else:
        data = loaded(path)
    if isinstance(data, TensorDict):
        return dict(data.items()), {}, {}
    batch = {} if data.batch is None else dict(data.batch.items())
    return batch, dict(data.non_tensor_batch), dict(data.meta_info)


def normalised(batch, arrays, meta):
    """TensorDict's stacks of objects as arrays, single ones as meta entries, as readers do."""
    tensors, arrays, meta = {}, dict(arrays), dict(meta)
    for name, value in batch.items():
        if isinstance(value, NonTensorStack):
            column = np.empty(len(value), dtype=object)
            for row, item in enumerate(value):
                column[row] = item.data if isinstance(item, NonTensorData) else item
            arrays[name] = column
        elif isinstance(value, NonTensorData):
            meta[name] = value.data
        else:
            tensors[name] = value
    return {"batch": tensors, "arrays": arrays, "meta": meta}


def same(one, other, path=""):
    """The first difference between two values, with their types; empty where there is none."""
    if isinstance(one, torch.Tensor):
        return same_tensor(one, other, path)
    if isinstance(one, np.ndarray):
        if one.dtype != other.dtype or one.shape != other.shape:
            return f"{path}: {one.dtype}{one.shape} {other.dtype}{other.shape}"
        if one.dtype != object:
            return "" if one.tobytes() == other.tobytes() else f"{path}: values"
        return first(zip(one.reshape(-1), other.reshape(-1), strict=True), path)
    if isinstance(one, dict):
        if list(one) != list(other):
            return f"{path}: keys {list(one)} {list(other)}"
        return first(((one[key], other[key]) for key in one), path)
    if isinstance(one, (list, tuple)):
        if type(one) is not type(other) or len(one) != len(other):
            return f"{path}: {type(one).__name__} {type(other).__name__}"
        return first(zip(one, other, strict=True), path)
    if type(other).__name__ == "Opaque":
        kind = one if isinstance(one, type) else type(one)
        return "" if other.name.endswith(kind.__qualname__) else f"{path}: {other}"
    equal = type(one) is type(other) and (one == other or one != one)
    return "" if equal else f"{path}: {one!r:.60} {other!r:.60}"


def first(pairs, path):
    found = (same(one, other, f"{path}[{at}]") for at, (one, other) in enumerate(pairs))
    return next((bad for bad in found if bad), "")


def same_tensor(one, other, path):
    if one.is_nested:
        if not other.is_nested or one.size(0) != other.size(0):
            return f"{path}: nested"
        return first(zip(one.unbind(), other.unbind(), strict=True), path)
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    alike = one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)
    return "" if alike else f"{path}: {one.dtype}{list(one.shape)}"


def compare(path):
    """How a file differs between the two readings; empty where it does not."""
    from dataproto_audit.dump.readers import read_batches

    want = normalised(*theirs(path))
    [saved] = read_batches(path)
    got = {"batch": saved.tensors, "arrays": saved.arrays, "meta": saved.meta}
    for part, fields in want.items():
        beside = part != "batch" and path.suffix == ".pt"  # keys and tags of the file beside it
        if set(fields) - set(got[part]) or (set(got[part]) - set(fields) and not beside):
            return f"{part}: {sorted(set(got[part]) ^ set(fields))}"
        bad = same(fields, {name: got[part][name] for name in fields}, part)
        if bad:
            return bad
    return ""


def main():
    if sys.argv[1] == "--make":
        make(Path(sys.argv[2]))
        return
    counts = {"files": 0, "same": 0, "empty": 0, "different": {}, "unreadable": {}}
    for root in map(Path, sys.argv[1:]):
        for path in sorted(p for p in root.rglob("*") if p.suffix in SUFFIXES):
            if not path.stat().st_size:
                counts["empty"] += 1
                continue
            counts["files"] += 1
            try:
                bad = compare(path)
            except Exception as error:  # noqa: BLE001 - which loader fails, and how, is the answer
                counts["unreadable"][str(path)] = f"{type(error).__name__}: {error}"[:200]
                continue
            counts["same"] += not bad
            if bad:
                counts["different"][str(path)] = bad
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
