"""Copies of what is told beside a batch: later changes of the original do not reach them."""

import numpy as np
import pytest
import torch

from dataproto_audit.dump.trace_copy import Copies, copied


def test_containers_at_every_depth_are_copies():
    told = {"ranks": [{"rank": 0, "tokens": 3}, {"rank": 1, "micro": [1, 2]}], "kept": {"a": 1}}
    held = copied(told)
    told["ranks"][0]["tokens"] = 9
    told["ranks"][1]["micro"].append(3)
    told["kept"]["a"] = 9
    told["ranks"].append({})
    assert held == {
        "ranks": [{"rank": 0, "tokens": 3}, {"rank": 1, "micro": [1, 2]}],
        "kept": {"a": 1},
    }


def test_tensors_and_arrays_are_copied_up_to_a_size():
    tensor, array, objects = torch.ones(2), np.ones(2), np.empty((2, 1), dtype=object)
    objects[:, 0] = [[1], {"k": (torch.ones(1),)}]
    told = {"t": tensor, "list": [array], "objects": objects, "one": np.array({"k": [1]})}
    held, referred = copied(told), copied(told, limit=15)
    tensor.zero_()
    array[:] = 0
    objects[0, 0].append(2)
    objects[1, 0]["k"][0].zero_()
    told["one"].item()["k"].append(2)
    assert held["t"].tolist() == [1, 1]
    assert held["list"][0].tolist() == [1, 1]
    assert held["objects"].shape == (2, 1)
    assert held["objects"][0, 0] == [1]
    assert held["objects"][1, 0]["k"][0].item() == 1
    assert held["one"].item() == {"k": [1]}
    assert referred["t"] is not tensor  # 8 bytes
    assert referred["list"][0] is array


def test_entries_that_did_not_change_are_not_copied_again():
    meta = {
        "t": torch.tensor([float("nan"), 0.0]), "half": torch.ones(3, dtype=torch.bfloat16),
        "wide": torch.ones(4, 4).t(), "flag": torch.tensor(True), "none": torch.zeros(0),
        "parameter": torch.nn.Parameter(torch.ones(2)), "a": np.array([float("nan"), -0.0]),
        "text": np.array(["x", "yy"]), "date": np.array(["2020"], "M8[Y]"), "empty": np.zeros(0),
        "step": np.arange(6)[::2], "in": {"deep": [np.ones(2), (torch.ones(1),)]},
        "objects": np.array([{"k": [1]}, None], dtype=object),
    }  # fmt: skip
    copies = Copies(limit=1 << 20)
    first = copies(meta)
    again = copies(meta)
    assert [name for name in meta if again[name] is not first[name]] == []
    assert [name for name in meta if first[name] is meta[name]] == []


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["t"].add_(1), lambda m: m["t"].numpy().fill(3), lambda m: m["t"].neg_(),
        lambda m: m["a"].fill(3), lambda m: np.negative(m["a"], out=m["a"]),
        lambda m: m["in"]["deep"][0].fill(3), lambda m: m["objects"][0]["k"].append(1),
        lambda m: m["objects"].fill(None), lambda m: m.update(a=m["a"].astype(np.float32)),
        lambda m: m.update(t=m["t"].double()), lambda m: m.update(t=m["t"].reshape(2, 1)),
    ],
)  # fmt: skip
def test_one_that_was_written_to_is_copied_again(change):
    meta = {
        "t": torch.zeros(2), "a": np.zeros(2), "in": {"deep": [np.ones(2)]},
        "objects": np.array([{"k": [1]}, None], dtype=object),
    }  # fmt: skip
    copies = Copies(limit=1 << 20)
    first, told = copies(meta), str(copied(meta))
    change(meta)
    now = copies(meta)
    assert str(first) == told  # what was there at the first boundary
    assert len([name for name in meta if now[name] is not first[name]]) == 1


def test_tensors_elsewhere_are_told_by_their_writes():
    """On the device ``meta``, in the place of an accelerator."""
    meta = {"t": torch.zeros(2, device="meta")}
    copies = Copies(limit=1 << 20)
    first = copies(meta)["t"]
    assert copies(meta)["t"] is first
    meta["t"].add_(1)
    second = copies(meta)["t"]
    assert second is not first
    meta["t"] = torch.zeros(2, device="meta")  # another one, written to as often
    meta["t"].add_(1)
    assert copies(meta)["t"] is not second
    with torch.inference_mode():
        meta["t"] = torch.zeros(2, device="meta")  # torch does not count
        third = copies(meta)["t"]
        assert copies(meta)["t"] is not third


def test_what_a_trace_leaves_out_is_not_copied():
    meta = {"t": torch.zeros(8), "a": np.zeros(8)}
    copies = Copies(limit=16)
    assert copies(meta)["t"] is copies(meta)["t"] is meta["t"]
    assert copies(meta)["a"] is meta["a"]


def test_what_holds_itself_stays_so():
    told: dict = {"a": [1]}
    told["self"] = told
    held = copied(told)
    assert held is not told
    assert held["self"] is held


def test_objects_stay_references():
    thing = object()
    assert copied([thing, (thing,)]) == [thing, (thing,)]
