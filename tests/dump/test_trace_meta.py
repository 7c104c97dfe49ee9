"""Meta entries in a trace: written once, read as they were at every boundary, never endless."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataproto_audit._protocol.safe.errors import Opaque
from dataproto_audit.codes import UsageError
from dataproto_audit.dump import trace_meta
from dataproto_audit.dump.trace import Trace, TraceWriter, write_step
from dataproto_audit.dump.trace_copy import copied, unchanged

STAGES = ("rollout", "reward", "old_log_prob", "ref_log_prob", "advantage", "update_actor")


def recorded(folder: Path, *metas: Mapping[str, Any]) -> list[Any]:
    """Boundaries of one step with these meta entries."""
    batches = [
        (STAGES[i], {"batch": {"x": torch.ones(2, 3)}, "meta_info": meta}, {})
        for i, meta in enumerate(metas)
    ]
    write_step(folder, 1, batches)
    return Trace(folder).step(1).boundaries


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


LARGE = {
    "names": [f"row {i}" for i in range(5000)],
    "nested": {"numbers": [0.5, float("nan")] * 99},
}


def test_an_entry_that_does_not_change_is_written_once(tmp_path: Path) -> None:
    once = recorded(tmp_path / "once", {"table": LARGE})
    often = recorded(tmp_path / "often", *[{"table": copied(LARGE)} for _ in STAGES])
    one = size(tmp_path / "once")
    assert size(tmp_path / "often") < 1.5 * one
    for boundary in often:
        assert repr(boundary.meta) == repr(once[0].meta) == repr({"table": LARGE})


def test_every_boundary_has_the_entries_that_it_had_in_their_order(tmp_path: Path) -> None:
    long = ["a long entry"] * 40
    metas: list[dict[str, Any]] = [
        {"temperature": 0.7, "a": long, "b": {"k": long}},
        {"b": {"k": long}, "a": [*long, 1], "temperature": 0.7},
        {"a": long, "temperature": 0.8},
        {"a": [*long, True], "new": (1, "x"), "b": {"k": long}},
        {"a": [*long, 1], "$": long},
        {3: long, "a": long},
    ]
    read = [boundary.meta for boundary in recorded(tmp_path, *metas)]
    assert [list(meta) for meta in read] == [list(meta) for meta in metas]
    assert repr(read) == repr(metas)  # 1 and True are told apart


def test_what_is_changed_from_within_is_new(tmp_path: Path) -> None:
    inner: dict[str, Any] = {"log": ["begin"] * 30}
    with TraceWriter(tmp_path, retention="last:1") as writer:
        writer.begin_step(1)
        for stage in STAGES[:3]:
            writer.write_boundary(stage, {"batch": {}, "meta_info": {"state": inner}})
            inner["log"].append(stage)
        writer.end_step()
    told = [b.meta["state"]["log"][30:] for b in Trace(tmp_path).step(1).boundaries]
    assert told == [[], ["rollout"], ["rollout", "reward"]]


def test_tensors_and_arrays_are_compared_by_what_they_hold(tmp_path: Path) -> None:
    tensor, array = torch.arange(1000.0), np.arange(1000)
    metas: list[dict[str, Any]] = [
        {"t": tensor, "a": {"deep": array}}, {"t": tensor.clone(), "a": {"deep": array.copy()}},
        {"t": tensor + 1, "a": {"deep": array.astype(np.int32)}}, {"t": tensor + 1},
    ]  # fmt: skip
    boundaries = recorded(tmp_path, *metas)
    for boundary, meta in zip(boundaries, metas, strict=True):
        assert torch.equal(boundary.meta["t"], meta["t"])
        if "a" in meta:
            assert np.array_equal(boundary.meta["a"]["deep"], meta["a"]["deep"])
            assert boundary.meta["a"]["deep"].dtype == meta["a"]["deep"].dtype
    refers = [trace_meta.place_of(b.head["meta"]["t"]) for b in boundaries]
    assert refers == [None, "00_rollout", None, "02_old_log_prob"]


def test_a_step_that_goes_on_refers_to_itself_only(tmp_path: Path) -> None:
    for _ in range(2):
        with TraceWriter(tmp_path, retention="all", append=True) as writer:
            writer.begin_step(1)
            for stage in STAGES[:2]:
                writer.write_boundary(stage, {"batch": {}, "meta_info": {"table": LARGE}})
            writer.end_step()
    boundaries = Trace(tmp_path).step(1).boundaries
    assert [repr(b.meta) for b in boundaries] == [repr({"table": LARGE})] * 4


def twice(depth: int, of: Any) -> Any:
    for _ in range(depth):
        of = [of, of]
    return of


def test_entries_that_hold_themselves_end(tmp_path: Path) -> None:
    itself: dict[str, Any] = {"n": 1}
    itself["me"], itself["also"] = itself, [itself, itself]
    items: list[Any] = ["x"]
    items += [items, items, (items, items)]
    array = np.empty(2, dtype=object)
    array[:] = [array, array]
    meta = {"itself": itself, "items": items, "array": array, "kept": 3}
    for boundary in recorded(tmp_path, meta, meta):
        assert boundary.meta["kept"] == 3
        assert boundary.meta["itself"]["n"] == 1
        assert boundary.meta["itself"]["me"] == Opaque("builtins.dict that holds itself")
        assert boundary.meta["items"][1] == Opaque("builtins.list that holds itself")
        assert "builtins.dict that holds itself" in boundary.head["opaque"]
    assert size(tmp_path) < 20_000


def test_very_deep_entries_end(tmp_path: Path) -> None:
    deep: Any = "bottom"
    for _ in range(20_000):
        deep = [deep]
    [boundary] = recorded(tmp_path, {"deep": deep, "kept": 3})
    assert boundary.meta["kept"] == 3
    while deep:  # long chains are let go of link by link
        deep = deep.pop() if isinstance(deep, list) else None


def test_an_entry_that_is_too_large_is_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace_meta, "LIMIT", 1 << 20)
    monkeypatch.setattr(trace_meta, "_SAID", set())
    metas = [
        {"text": "x" * (1 << 21), "tensor": torch.zeros(1 << 19), "bomb": twice(50, "y"), "kept": 3}
    ] * 3
    with caplog.at_level(logging.WARNING, "dataproto_audit"):
        boundaries = recorded(tmp_path, *metas)
    for boundary in boundaries:
        assert boundary.meta["kept"] == 3
        for name in ("text", "tensor", "bomb"):
            told = f"the meta entry {name!r}, larger than 1 MiB and left out"
            assert boundary.meta[name] == Opaque(told)
            assert told in boundary.head["opaque"]
    assert len(caplog.records) == 3
    assert size(tmp_path) < 20_000


def test_what_is_shared_is_no_matter_below_the_limit(tmp_path: Path) -> None:
    [boundary, other] = recorded(tmp_path, *[{"shared": twice(5, ["y"])}] * 2)
    assert boundary.meta == other.meta == {"shared": twice(5, ["y"])}


def test_traces_without_references_read_as_before(tmp_path: Path) -> None:
    recorded(tmp_path, {"table": LARGE}, {"table": LARGE})
    path = tmp_path / "step_000001" / "01_reward" / "boundary.json"
    head = json.loads(path.read_text())
    assert trace_meta.place_of(head["meta"]["table"]) == "00_rollout"
    first = json.loads((path.parents[1] / "00_rollout" / "boundary.json").read_text())
    path.write_text(json.dumps({**head, "meta": first["meta"]}))
    assert repr(Trace(tmp_path).step(1).boundaries[1].meta) == repr({"table": LARGE})


@pytest.mark.parametrize(
    ("entry", "said"),
    [({"$": "at", "v": "09_gone"}, "is missing"), ({"$": "at", "v": "../x"}, "is missing"),
     ({"$": "at", "v": "01_reward"}, "cannot be read"), ({"$": "at"}, "is missing"),
     ({"$": "at", "v": "02_old_log_prob"}, "is missing")],
)  # fmt: skip
def test_references_to_nothing_are_refused(tmp_path: Path, entry: Any, said: str) -> None:
    recorded(tmp_path, {"table": LARGE}, {"table": LARGE}, {})
    path = tmp_path / "step_000001" / "01_reward" / "boundary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "meta": {"table": entry}}))
    with pytest.raises(UsageError, match="DPA820") as refused:
        _ = Trace(tmp_path).step(1).boundaries[1].meta
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ({"a": [1, (2, "x")]}, {"a": [1, (2, "x")]}, True),
        ([float("nan"), 0.0], [float("nan"), 0.0], True),
        ([0.0], [-0.0], False),
        ([1], [True], False),
        ([1], [1.0], False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),
        ({1: "x"}, {True: "x"}, False),
        ([1, [2]], [1, (2,)], False),
        ([1, 2], [1, 2, 3], False),
        ({"a": torch.ones(1)}, {"a": torch.ones(1)}, True),
        ({"a": torch.zeros(1)}, {"a": -torch.zeros(1)}, False),
        ({"a": np.ones(1)}, {"a": np.ones(1)}, True),
        ({"a": np.ones(1)}, {"a": np.ones(1, np.float32)}, False),
        ({1}, {1}, False),
        (object, object, False),
    ],
)
def test_what_counts_as_unchanged(old: Any, new: Any, same: bool) -> None:
    assert unchanged(old, new) is same


def test_tensors_and_arrays_are_what_they_were_at_the_boundary(tmp_path: Path) -> None:
    tensor, array, shared = torch.zeros(64), np.zeros(64), np.zeros(64)
    rows = np.array([["a"], ["b"]], dtype=object)[:, 0]
    rows[:] = [["a"], ["b"]]
    meta = {
        "t": tensor, "a": {"deep": [array]}, "s": torch.from_numpy(shared), "rows": rows,
        "kept": torch.arange(64.0),
    }  # fmt: skip
    for retention in ("last:1", "all"):
        with TraceWriter(tmp_path / retention, retention=retention) as writer:
            writer.begin_step(1)
            for number, stage in enumerate(STAGES[:3]):
                tensor[7] = array[7] = shared[7] = number
                rows[0][:] = [number]
                writer.write_boundary(stage, {"batch": {}, "meta_info": meta})
            writer.end_step()
        for number, boundary in enumerate(Trace(tmp_path / retention).step(1).boundaries):
            told = boundary.meta
            assert told["t"][7] == told["a"]["deep"][0][7] == told["s"][7] == number
            assert told["rows"][0] == [number]
            kept = trace_meta.place_of(boundary.head["meta"]["kept"])
            assert kept == (None if number == 0 else "00_rollout")


def test_shared_and_cyclic_values_are_compared_in_short_time() -> None:
    array = np.empty(2, dtype=object)
    array[:] = [array, array]
    assert unchanged(copied(array), array)
    assert unchanged(twice(60, "x"), twice(60, "x"))
    assert not unchanged(twice(60, "x"), twice(60, "y"))
    one: list[Any] = [1]
    one.append(one)
    assert unchanged(copied(one), one)
