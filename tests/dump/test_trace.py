"""Traces: what is written, what is read, what is kept, and what a kill leaves behind."""

import contextlib
import json
import os
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataproto_audit.atomic import TMP_SUFFIX
from dataproto_audit.auditor import Auditor
from dataproto_audit.batch import BatchView
from dataproto_audit.codes import RunError, UsageError
from dataproto_audit.dump import trace_disk, trace_write
from dataproto_audit.dump.trace import (
    Opaque,
    Retention,
    Trace,
    TraceWriter,
    find_trace,
    is_trace,
    write_step,
)
from dataproto_audit.dump.trace_copy import copied
from dataproto_audit.dump.trace_format import narrowed, widened
from dataproto_audit.dump.trace_json import Decoder
from dataproto_audit.findings import Finding, Report
from dataproto_audit.protocol import DataProto
from dataproto_audit.testing.bases import BASES
from dataproto_audit.testing.healthy import boundaries
from dataproto_audit.testing.layouts import jagged
from dataproto_audit.testing.options import Options

FAILED = Report([Finding("DPA205", "fail", "rollout", "x")])
SMALL = Options(prompts=3, n=2, response_width=5)


def batch(rows: int = 4, **more: Any) -> DataProto:
    ids = torch.arange(rows * 3).reshape(rows, 3)
    arrays = {"uid": np.array([f"u{i}" for i in range(rows)], dtype=object)}
    return DataProto.from_dict({"responses": ids, **more}, arrays, {"temperature": 1.0})


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.is_nested != b.is_nested:
        return False
    if a.is_nested:
        return all(torch.equal(x, y) for x, y in zip(a.unbind(), b.unbind(), strict=True))
    return torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


@pytest.mark.parametrize("name", ["plain", "tools", "half", "images", "padded_rows", "recorded"])
@pytest.mark.parametrize("layout", ["padded", "jagged"])
def test_every_boundary_reads_as_it_was(tmp_path: Path, name: str, layout: str) -> None:
    filled = name == "padded_rows"
    options = replace(BASES[name], prompts=6 - filled, n=2, ranks=2, pad_rows=2 * filled)
    given = []
    with TraceWriter(tmp_path, retention="all", settings=asdict(options.settings())) as writer:
        writer.begin_step(options.step)
        for b in boundaries(options):
            parts = jagged(b.batch) if layout == "jagged" and name != "images" else b.batch
            view = BatchView.of(parts)
            writer.write_boundary(b.stage, parts, when=b.when, evidence=b.evidence)
            given.append((b, {n: t.clone() for n, t in view.tensors.items()}, dict(view.arrays)))
        writer.end_step(metrics={"loss": float("nan"), "n": 3})
    step = Trace(tmp_path).step(options.step)
    assert step.metrics["n"] == 3
    assert np.isnan(step.metrics["loss"])
    for (b, tensors, arrays), read in zip(given, step.boundaries, strict=True):
        view = read.view()
        assert (read.stage, read.when) == (b.stage, b.when)
        assert list(view.tensors) == list(tensors)
        assert [n for n in tensors if not same(view.tensors[n], tensors[n])] == []
        assert {n: repr(a.tolist()) for n, a in view.arrays.items()} == {
            n: repr(a.tolist()) for n, a in arrays.items()
        }
        assert set(read.evidence) == set(b.evidence)
        assert len(read.row_keys) == read.rows


def test_only_what_is_new_is_written(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, retention="all") as writer:
        writer.begin_step(1)
        for b in boundaries(SMALL):
            writer.write_boundary(b.stage, b.batch, when=b.when)
        writer.end_step()
    step = Trace(tmp_path).step(1)
    own = {b.name: {n for n, s in b.fields.items() if s.at == b.name} for b in step.boundaries}
    assert own["03_union_before"] == set()
    assert own["06_balance"] == set()
    assert step["06_balance"].fields["responses"].orders == ("06_balance",)
    assert own["08_reward"] == {"token_level_scores", "score"}
    after = step.find("advantage")
    assert after is not None
    assert after.fields["returns"].key == "advantages"  # the same values are stored once
    assert after.fields["token_level_rewards"].key == "token_level_scores"


@pytest.mark.parametrize("name", ["plain", "tools", "images"])
def test_what_an_auditor_hands_on_reads_back(name: str, tmp_path: Path) -> None:
    options = replace(BASES[name], prompts=4, n=2)
    given = []
    with TraceWriter(tmp_path, retention="all") as writer:
        auditor = Auditor(options.settings(), trace=writer)
        auditor.begin_step(options.step)
        for b in boundaries(options):
            auditor.boundary(b.stage, b.batch, when=b.when, evidence=b.evidence)
            given.append({n: t.clone() for n, t in BatchView.of(b.batch).tensors.items()})
        auditor.end_step()
    for tensors, read in zip(given, Trace(tmp_path).step(options.step).boundaries, strict=True):
        assert [n for n in tensors if not same(read.view().tensors[n], tensors[n])] == []


def test_equal_values_of_another_kind_are_new(tmp_path: Path) -> None:
    made = batch(values=torch.ones(4, 3, dtype=torch.int64))
    with TraceWriter(tmp_path, retention="all") as writer:
        auditor = Auditor(level="shape", on_fail="record", trace=writer)
        auditor.begin_step(1)
        auditor.boundary("values", made)
        made.batch["values"] = made.batch["values"].int()
        auditor.boundary("update_critic", made, when="before")
        auditor.end_step()
    first, second = Trace(tmp_path).step(1).boundaries
    assert first.tensor("values").dtype == torch.int64
    assert second.tensor("values").dtype == torch.int32


def test_a_copy_is_taken_at_once(tmp_path: Path) -> None:
    made = batch(values=torch.ones(4, 3))
    with TraceWriter(tmp_path, retention="all") as writer:
        writer.begin_step(1)
        writer.write_boundary("values", made)
        made.batch["values"].zero_()
        writer.write_boundary("update_critic", made, when="before")
        writer.end_step()
    first, second = Trace(tmp_path).step(1).boundaries
    assert first.tensor("values").sum() == 12
    assert second.tensor("values").sum() == 0


@pytest.mark.parametrize(
    ("tensor", "stored"),
    [
        (torch.tensor([0, 1, 255]), torch.uint8),
        (torch.tensor([-1, 300]), torch.int16),
        (torch.tensor([70_000]), torch.int32),
        (torch.tensor([2**40]), torch.int64),
        (torch.tensor([0.0, 1.0]), torch.uint8),
        (torch.tensor([0.0, -0.0]), torch.bfloat16),
        (torch.tensor([0.5, -3.0]), torch.bfloat16),
        (torch.tensor([0.1]), torch.float32),
        (torch.tensor([0.1], dtype=torch.float64), torch.float64),
        (torch.tensor([0.5], dtype=torch.float64), torch.float32),
        (torch.tensor([float("nan"), 1.0]), torch.float32),
        (torch.tensor([True, False]), torch.bool),
        (torch.zeros(0, dtype=torch.int64), torch.int64),
    ],
)
def test_narrowing_gives_every_bit_back(tensor: torch.Tensor, stored: torch.dtype) -> None:
    small = narrowed(tensor)
    assert small.dtype == stored
    back = widened(small, str(tensor.dtype).removeprefix("torch."))
    words = {4: torch.int32, 8: torch.int64, 1: torch.uint8}[tensor.element_size()]
    assert torch.equal(back.view(words), tensor.view(words))


def test_objects_keep_their_types_and_nothing_is_executed(tmp_path: Path) -> None:
    class Odd:
        def __reduce__(self) -> Any:
            return os.system, ("touch pwned",)

    values: list[Any] = [
        {"a": (1, 2.5), 3: {"x"}, "$": None}, [float("inf"), b"\x00", True],
        np.float32(0.1), torch.arange(4), np.arange(6).reshape(2, 3), Odd(), "text",
        np.array([[1, 2], ["a", None]], dtype=object),
    ]  # fmt: skip
    column = np.empty(len(values), dtype=object)
    column[:] = values
    write_step(tmp_path, 3, [("reward", {"batch": {}, "non_tensor_batch": {"x": column},
                                         "meta_info": {"deep": values}}, {})])  # fmt: skip
    read = Trace(tmp_path).step(3).boundaries[0]
    got = read.array("x")
    assert got[0] == values[0]
    assert got[1] == values[1]
    assert type(got[2]) is np.float32
    assert torch.equal(got[3], values[3])
    assert got[4].tolist() == values[4].tolist()
    assert isinstance(got[5], Opaque)
    assert got[7].tolist() == values[7].tolist()
    assert isinstance(read.meta["deep"][5], Opaque)
    assert [name for name in read.head["opaque"] if name.endswith("Odd")]
    assert not Path("pwned").exists()


def test_some_rows_are_read_alone(tmp_path: Path) -> None:
    made = batch(rows=50, values=torch.rand(50, 7))
    write_step(tmp_path, 1, [("values", made, {})])
    boundary = Trace(tmp_path).step(1).boundaries[0]
    rows = [41, 3, 4]
    view = boundary.view(rows=rows, names=["values", "uid"])
    assert torch.equal(view.tensors["values"], made.batch["values"][rows])
    assert view.arrays["uid"].tolist() == ["u41", "u3", "u4"]
    with pytest.raises(UsageError, match="DPA820"):
        boundary.tensor("values", rows=[50])


# -- what is kept ----------------------------------------------------------------------------------


def recorded(folder: Path, retention: str, steps: dict[int, bool]) -> list[int]:
    with TraceWriter(folder, retention=retention) as writer:
        for number, failed in steps.items():
            writer.begin_step(number)
            writer.write_boundary("rollout", batch(), report=FAILED if failed else None)
            writer.end_step()
    return Trace(folder).steps if is_trace(folder) else []


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        ("all", [1, 2, 3, 4, 5, 6]),
        ("every:3", [3, 6]),
        ("failing", [2, 5]),
        ("last:1", [2, 6]),
        ("last:3", [2, 4, 5, 6]),
    ],
)
def test_retention(tmp_path: Path, retention: str, kept: list[int]) -> None:
    steps = {number: number in (2, 5) for number in range(1, 7)}
    assert recorded(tmp_path / "t", retention, steps) == kept


def test_nothing_reaches_the_disk_before_it_must(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", retention="last:2")
    for number in range(1, 6):
        writer.begin_step(number)
        writer.write_boundary("rollout", batch())
        writer.end_step()
    assert not (tmp_path / "t").exists()
    writer.close()
    assert Trace(tmp_path / "t").steps == [4, 5]


def test_an_open_step_is_broken_off(tmp_path: Path) -> None:
    with TraceWriter(tmp_path) as writer:
        writer.begin_step(7)
        writer.write_boundary("rollout", batch(), when="before")
    step = Trace(tmp_path).step(7)
    assert (step.ended, [b.name for b in step.boundaries]) == (
        "broken_off", ["00_rollout_before"],
    )  # fmt: skip


@pytest.mark.parametrize("text", ["last", "last:0", "every:-1", "ever:2", "all:1", "", "off"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"audit\.trace.*last:K"):
        Retention.parse(text, key="audit.trace")


def test_a_resumed_run_removes_what_lies_ahead(tmp_path: Path) -> None:
    recorded(tmp_path, "all", dict.fromkeys(range(1, 5), False))
    with TraceWriter(tmp_path, retention="all", after=2) as writer:
        writer.begin_step(3)
        writer.write_boundary("rollout", batch())
        writer.end_step()
    assert Trace(tmp_path).steps == [1, 2, 3]


def test_a_slow_disk_makes_the_producer_wait_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_write, "QUEUE_ITEMS", 2)
    write, waiting = trace_disk.StepFiles.write, []

    def slow(self: Any, snapshot: Any) -> None:
        time.sleep(0.01)
        waiting.append(writer._items)
        write(self, snapshot)

    monkeypatch.setattr(trace_disk.StepFiles, "write", slow)
    with TraceWriter(tmp_path, retention="all") as writer:
        writer.begin_step(1)
        for _ in range(12):
            writer.write_boundary("rollout", batch())
        writer.end_step()
    assert max(waiting) <= 2
    assert writer.waited_s > 0
    assert len(Trace(tmp_path).step(1).boundaries) == 12


def test_a_step_that_breaks_off_is_kept_in_every_mode(tmp_path: Path) -> None:
    for retention in ("every:10", "failing", "last:1"):
        folder = tmp_path / retention[:4]
        with TraceWriter(folder, retention=retention) as writer:
            for number, ended in ((1, "finished"), (2, "broken_off"), (3, "finished")):
                writer.begin_step(number)
                writer.write_boundary("rollout", batch(), report=FAILED if number == 1 else None)
                writer.end_step(ended=ended)
        assert 2 in Trace(folder).steps
        assert Trace(folder).step(2).boundaries[0].view().rows == 4


@pytest.mark.parametrize("retention", ["every:10", "last:1", "failing", "all"])
def test_a_marked_step_is_kept(tmp_path: Path, retention: str) -> None:
    with TraceWriter(tmp_path, retention=retention) as writer:
        assert not writer.mark(1)
        for number in (1, 2, 3):
            writer.begin_step(number)
            writer.write_boundary("rollout", batch(), report=FAILED if number == 1 else None)
            assert not writer.mark(9)
            assert number != 2 or writer.mark(2)
            writer.end_step()
    assert 2 in Trace(tmp_path).steps


@pytest.mark.parametrize("retention", ["all", "last:1", "last:3", "every:10", "failing"])
def test_a_step_that_begins_again_goes_on(tmp_path: Path, retention: str) -> None:
    """The trainer raised after the end of step 1: what was recorded of it stays."""
    made = batch()
    with TraceWriter(tmp_path, retention=retention) as writer:
        writer.begin_step(1)
        writer.write_boundary("rollout", made)
        writer.end_step(metrics={"loss": 1.0})
        writer.at_step(1)
        writer.write_boundary("update_actor", made, when="before", part="input")
        writer.end_step(ended="broken_off")
        writer.begin_step(1)
        writer.write_boundary("reward", made)
        writer.end_step(ended="broken_off")
    step = Trace(tmp_path).step(1)
    assert [b.name for b in step.boundaries] == [
        "00_rollout", "01_update_actor_before_input", "02_reward",
    ]  # fmt: skip
    assert (step.ended, step.metrics) == ("broken_off", {"loss": 1.0})
    assert all(b.array("uid").tolist() == made.non_tensor_batch["uid"].tolist()
               for b in step.boundaries)  # fmt: skip


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def test_an_error_of_the_disk_leaves_no_thread_and_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_disk, "fsync_folder", full_disk)
    theirs = ValueError("of the run")
    with pytest.raises(ValueError, match="of the run") as caught:  # noqa: PT012, SIM117 - as it is used
        with TraceWriter(tmp_path, retention="all") as writer:
            writer.write_boundary("rollout", batch())
            raise theirs
    assert caught.value is theirs
    assert "DPA802" in "".join(theirs.__notes__)
    with pytest.raises(RunError, match="DPA802"):
        write_step(tmp_path, 1, [("rollout", batch(), {})])
    writer = TraceWriter(tmp_path, retention="all")
    writer.write_boundary("rollout", batch())
    with contextlib.suppress(RunError):
        writer.flush()
    writer._told = False
    with pytest.raises(RunError, match="DPA802"):  # raised while the step is closed
        writer.close()
    alive = [thread.name for thread in threading.enumerate()]
    assert "dpa-trace" not in alive


def test_columns_of_other_kinds_are_left_out(tmp_path: Path) -> None:
    made = {"batch": dict(batch().batch), "meta_info": {}, "non_tensor_batch": {
        "day": np.array(["2024-01-01"] * 4, "datetime64[D]"), "raw": np.array([b"a"] * 4),
        "pair": np.zeros(4, [("x", "i4")]), "text": np.array(["a", "bc", "", "d"], "U64"),
    }}  # fmt: skip
    write_step(tmp_path, 1, [("reward", made, {})])
    read = Trace(tmp_path).step(1).boundaries[0]
    assert set(read.view().arrays) == {"text"}
    assert read.array("text").tolist() == ["a", "bc", "", "d"]
    assert [name.partition(":")[0] for name in read.head["opaque"]] == ["day", "pair", "raw"]


def test_frozen_sets_stay_frozen(tmp_path: Path) -> None:
    meta = {"sets": {frozenset({1, 2})}, "keys": {frozenset({"a"}): 1}, "plain": {3}}
    made = {"batch": dict(batch().batch), "non_tensor_batch": {}, "meta_info": meta}
    write_step(tmp_path, 1, [("reward", made, {})])
    assert Trace(tmp_path).step(1).boundaries[0].meta == meta


def test_a_width_of_text_is_no_reason_to_allocate() -> None:
    said = {"$": "objects", "v": ["a"], "shape": [1], "dtype": "<U1000000000"}
    assert Decoder({})(said).dtype == "<U1"
    for dtype in ("<Ux", "<U-3", "O", "<M8"):
        with pytest.raises(ValueError, match="holds no text"):
            Decoder({})({**said, "dtype": dtype})


def test_names_of_stages_that_no_folder_may_have(tmp_path: Path) -> None:
    names = ["../../x", "a b/ü", "", "s" * 300]
    write_step(tmp_path, 1, [(name, batch(), {"part": name}) for name in names])
    step = Trace(tmp_path).step(1)
    assert [(b.stage, b.part, b.view().rows) for b in step.boundaries] == [
        (name, name, 4) for name in names
    ]
    assert {p.parent.parent for p in tmp_path.rglob("boundary.json")} == {step.folder}


def test_evidence_is_as_it_was_at_the_boundary(tmp_path: Path) -> None:
    evidence: dict[str, Any] = {"ranks": [{"rank": 0}], "loss": torch.ones(2), "last": ([1],)}
    looped: list[Any] = [evidence["ranks"]]
    made = batch()
    made.meta_info["sizes"] = [1]
    with TraceWriter(tmp_path, retention="last:1") as writer:
        writer.write_boundary("rollout", made, evidence=evidence)
        evidence["ranks"][0]["rank"] = 7
        evidence["loss"].zero_()
        evidence["last"][0].append(2)
        made.meta_info["sizes"].append(2)
    read = Trace(tmp_path).step(0).boundaries[0]
    assert (read.evidence["ranks"], read.evidence["last"]) == ([{"rank": 0}], ([1],))
    assert read.evidence["loss"].tolist() == [1, 1]
    assert read.meta["sizes"] == [1]
    looped.append(looped)
    again = copied(looped)
    assert again[1] is again
    assert again[0] is not looped[0]


# -- crash points ----------------------------------------------------------------------------------


class Injected(OSError):
    """The disk refuses at the n-th call."""


def test_a_failure_at_any_write_leaves_whole_steps_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write, fsync, rename and mkdir of two steps fails in turn, for good."""
    left = {"calls": 10**9}

    def counted(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            left["calls"] -= 1
            if left["calls"] < 0:
                raise Injected(28, "No space left on device")
            return real(*args, **kwargs)

        return call

    def half(tensors: Any, path: Any) -> None:
        left["calls"] -= 1
        if left["calls"] < 0:
            Path(path).write_bytes(b"\x08\x00")
            raise trace_disk.SafetensorError("I/O error: No space left on device (os error 28)")
        real_save(tensors, path)

    real_save = trace_disk.save_file
    monkeypatch.setattr(trace_disk, "save_file", half)
    for name in ("fsync", "replace", "mkdir"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))

    def attempt(folder: Path, calls: int) -> int:
        left["calls"] = calls
        writer = TraceWriter(folder, retention="all")
        caught = []
        try:
            for number in (1, 2):
                writer.begin_step(number)
                writer.write_boundary("rollout", batch())
                writer.write_boundary("reward", batch(scores=torch.rand(4, 3)))
                writer.end_step()
            writer.close()
        except RunError as error:
            caught.append(error)
        finally:
            left["calls"] = 10**9
        try:
            writer.close()
        except RunError as error:
            caught.append(error)
        assert len(caught) <= 1  # reported once
        assert all(error.code == "DPA802" and "disk is full" in str(error) for error in caught)
        return len(caught)

    attempt(tmp_path / "whole", 10**6)
    total = 10**6
    failed = 0
    for calls in range(total):
        folder = tmp_path / f"at{calls}"
        broke = attempt(folder, calls)
        failed += broke
        steps = []
        with contextlib.suppress(UsageError):  # nothing whole is there
            steps = Trace(folder).steps
        for number in steps:
            step = Trace(folder).step(number)
            assert [b.stage for b in step.boundaries] == ["rollout", "reward"]
            assert all(b.view().rows == 4 for b in step.boundaries)
        if not broke:
            assert steps == [1, 2]
            break
    assert failed > 20


def test_leftovers_of_a_kill_are_cleared_and_never_read(tmp_path: Path) -> None:
    recorded(tmp_path, "all", {1: False})
    torn = tmp_path / "step_000002" / "00_rollout"
    torn.mkdir(parents=True)
    (torn / f".tensors.safetensors.1{TMP_SUFFIX}").write_bytes(b"half")
    assert Trace(tmp_path).steps == [1]
    assert Trace(tmp_path).torn == [2]
    assert recorded(tmp_path, "all", {3: False}) == [1, 3]
    assert not list(tmp_path.rglob(f"*{TMP_SUFFIX}"))


def test_a_folder_that_is_not_writable_is_told_once(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    writer = TraceWriter(blocked, retention="all")
    writer.begin_step(1)
    writer.write_boundary("rollout", batch())
    with pytest.raises(RunError, match="DPA802"):
        writer.close()
    writer.write_boundary("rollout", batch())
    writer.close()


# -- bad input -------------------------------------------------------------------------------------


def spoil(folder: Path, how: str) -> None:
    place = folder / "step_000001" / "01_reward"
    head = place / "boundary.json"
    said = json.loads(head.read_bytes())
    if how == "newer":
        said["schema"] = 99
    elif how == "neighbour":
        for entry in said["fields"]:
            entry["at"] = "09_gone"
    elif how == "outside":
        said["fields"][0]["at"] = "../../step_000002/00_rollout"
    elif how == "kind":
        said["kind"] = "something else"
    elif how == "step":
        said["step"] = 2
    elif how == "dtype":
        said["fields"][0]["dtype"] = "object"
    head.write_text(json.dumps(said))
    if how == "text":
        head.write_text("{")
    elif how == "tensors":
        (place / "tensors.safetensors").write_bytes(b"")
    elif how == "truncated":
        whole = (place / "tensors.safetensors").read_bytes()
        (place / "tensors.safetensors").write_bytes(whole[:-5])
    elif how == "objects":
        (place / "objects.json").write_text("[]")
    elif how == "gone":
        (place / "boundary.json").unlink()
    elif how == "list":
        (folder / "step_000001" / "step.json").write_text('{"schema": 1, "boundaries": ["../x"]}')


def read_all(folder: Path) -> None:
    for boundary in Trace(folder).step(1).boundaries:
        boundary.view()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("newer", "schema 99"), ("neighbour", "missing"), ("outside", "missing"),
        ("kind", "no boundary"), ("step", "of step 2"), ("dtype", "kind of number"),
        ("text", "cannot be read"), ("tensors", "cannot be read"), ("truncated", "cannot be read"),
        ("objects", "cannot be read"), ("gone", "cannot be read"), ("list", "name that is none"),
    ],
)  # fmt: skip
def test_what_is_broken_is_one_clear_sentence(tmp_path: Path, how: str, says: str) -> None:
    other = np.array(["a", "b", "c", "d"], dtype=object)
    later = batch(scores=torch.rand(4, 3))
    later.non_tensor_batch["other"] = other
    write_step(tmp_path, 1, [("rollout", batch(), {}), ("reward", later, {})])
    spoil(tmp_path, how)
    with pytest.raises(UsageError, match=says) as caught:
        read_all(tmp_path)
    assert caught.value.code == ("DPA821" if how == "newer" else "DPA820")
    assert caught.value.remedy
    assert str(tmp_path) in str(caught.value)


def test_paths_that_are_no_trace(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no trace"):
        Trace(tmp_path)
    with pytest.raises(UsageError, match="there is no file or folder"):
        Trace(tmp_path / "absent")
    (tmp_path / "step_000001").mkdir()
    with pytest.raises(UsageError, match="not whole"):
        Trace(tmp_path)
    write_step(tmp_path, 4, [("rollout", batch(), {})])
    with pytest.raises(UsageError, match=r"no step 9.*4"):
        Trace(tmp_path).step(9)
    assert find_trace(tmp_path / "step_000004") == (tmp_path, 4)
    assert find_trace(tmp_path / "step_000004" / "00_rollout") == (tmp_path, 4)


def _one_boundary(folder: Path) -> Path:
    with TraceWriter(folder, retention="all") as writer:
        writer.begin_step(1)
        writer.write_boundary("rollout", batch())
        writer.end_step(metrics={"loss": 1.0})
    return next(folder.glob("step_*/00_rollout"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rows", -1), ("rows", 3.7), ("rows", 10**30), ("rows", float("inf")), ("rows", True),
        ("settings", [3]), ("row_keys", 5), ("sums", 3), ("findings", {}), ("outcomes", "x"),
        ("stage", 4),
    ],
)  # fmt: skip
def test_an_entry_of_another_kind_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    path = _one_boundary(tmp_path) / "boundary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(UsageError, match=r"DPA820 .*it is no boundary"):
        _ = Trace(tmp_path).step(1).boundaries


@pytest.mark.parametrize("metrics", [5, [1], {"loss": 10**400}])
def test_metrics_of_another_kind_are_refused(metrics: Any, tmp_path: Path) -> None:
    path = _one_boundary(tmp_path).parent / "step.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "metrics": metrics}))
    with pytest.raises(UsageError, match=r"DPA820 .*metrics are no numbers"):
        Trace(tmp_path).step(1)


@pytest.mark.parametrize("name", ["boundary.json", "objects.json", "tensors.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_file_is_not_waited_for(name: str, kind: str, tmp_path: Path) -> None:
    path = _one_boundary(tmp_path) / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(UsageError, match=r"DPA820 .*a link or a device"):
        Trace(tmp_path).step(1).boundaries[0].view()
