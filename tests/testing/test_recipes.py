"""Tiny batches, and the operations that bug reports are retold with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dataproto_audit
from dataproto_audit.codes import UsageError
from dataproto_audit.testing.recipes import OPERATIONS, cook


def made(op: str, base: str = "T", **more: Any) -> dict[str, Any]:
    return cook(base, [{"op": op, **more}])


def test_the_bases_unchanged_are_quiet() -> None:
    for base in "TMV":
        report = dataproto_audit.check(cook(base, []))
        assert not [f for f in report if f.severity != "info"], str(report)
        assert report.counts()["passed"] > 20


def test_a_base_is_made_anew_each_time() -> None:
    first = cook("T", [])
    first["batch"]["responses"][:] = 7
    assert cook("T", [])["batch"]["responses"][0, 0] == 3


def test_the_bases_are_what_they_are_said_to_be() -> None:
    text, tools, images = (cook(base, []) for base in "TMV")
    assert text["batch"]["response_mask"].sum(1).tolist() == [3, 4, 2, 5, 2, 4]
    assert text["non_tensor_batch"]["uid"].tolist() == list("AAABBB")
    advantages = text["batch"]["advantages"]
    assert advantages[:, 0].round(3).tolist() == [1.0, -1.0, 0.0, -1.147, 0.688, 0.459]
    written = tools["batch"]["responses"] > 20
    assert (tools["batch"]["rollout_log_probs"][written] == 0).all()
    assert (tools["batch"]["response_mask"][written] == 0).all()
    assert images["batch"]["position_ids"].shape == (2, 4, 8)
    assert images["batch"]["position_ids"][0, 3].tolist() == [0, 0, 1, 2, 3, 4, 5, 0]


def test_cells_are_set_added_to_and_multiplied() -> None:
    old = cook("T", [])["batch"]["old_log_probs"]
    new = made("set", f="old_log_probs", at=[0, "1:3"], v=["nan", -2.0])["batch"]["old_log_probs"]
    assert np.isnan(new[0, 1])
    assert new[0, 2] == -2.0
    assert np.array_equal(new[1:], old[1:])
    new = made("add", f="old_log_probs", at=[0, 0], v=-1.0)["batch"]["old_log_probs"]
    assert new[0, 0] == old[0, 0] - 1.0
    new = made("mul", f="old_log_probs", at=[1], v=2.0)["batch"]["old_log_probs"]
    assert np.array_equal(new[1], 2 * old[1])
    ids = made("set", f="responses", at=[0, 0], v=8)["batch"]["responses"]
    assert ids.dtype == np.int64
    lifted = made("set", f="responses", at=[0, 0], v=0.5)["batch"]["responses"]
    assert lifted.dtype == np.float64


def test_fields_are_replaced_copied_dropped_and_made() -> None:
    batch = made("replace", f="values", v=[[1.0, "inf"]])["batch"]
    assert batch["values"].tolist() == [[1.0, float("inf")]]
    batch = made("copy", src="old_log_probs", dst="ref_log_prob")["batch"]
    assert batch["ref_log_prob"] is not batch["old_log_probs"]
    whole = made("del", f=["values", "uid", "never there"])
    assert "values" not in whole["batch"]
    assert "uid" not in whole["non_tensor_batch"]
    assert made("zeros", f="loss_mask", shape=[6, 5])["batch"]["loss_mask"].shape == (6, 5)


def test_rows_are_gathered() -> None:
    whole = made("take", f="*", idx=[5, 0])
    assert {len(t) for t in whole["batch"].values()} == {2}
    assert whole["non_tensor_batch"]["uid"].tolist() == ["B", "A"]
    one = made("take", f="values", idx=[1, 0, 2, 3, 4, 5], nt=["index"])
    assert one["batch"]["values"][0, 0] == 0.1
    assert one["non_tensor_batch"]["uid"].tolist() == list("AAABBB")
    objects = made("take_nt", k=["uid"], idx=[3, 0])["non_tensor_batch"]
    assert objects["uid"].tolist() == ["B", "A"]
    assert len(objects["index"]) == 6


@pytest.mark.parametrize(
    ("by", "row"), [(1, [0, 3, 4, 9, 0]), (-1, [4, 9, 0, 0, 0]), (0, [3, 4, 9, 0, 0])]
)
def test_columns_are_shifted(by: int, row: list[int]) -> None:
    assert made("shift", f="responses", by=by)["batch"]["responses"][0].tolist() == row


def test_columns_axes_and_kinds_are_changed() -> None:
    assert made("cols", f="responses", at="1:")["batch"]["responses"].shape == (6, 4)
    channels = made("channels", "V", f="position_ids", at=[1, 2, 3])
    assert channels["batch"]["position_ids"].shape == (2, 3, 8)
    assert made("cast", f="values", dtype="float32")["batch"]["values"].dtype == np.float32
    assert made("reshape", f="values", shape=[3, 10])["batch"]["values"].shape == (3, 10)
    turned = made("transpose", "V", f="position_ids", axes=[1, 0, 2])["batch"]["position_ids"]
    assert turned.shape == (4, 2, 8)


def test_objects_and_meta_entries_are_written() -> None:
    objects = made("nt", k="uid", v=["a", "b"])["non_tensor_batch"]
    assert objects["uid"].shape == (2,)
    nested = made("nt", k="turns", v=[[1, 2], [3, 4]])["non_tensor_batch"]["turns"]
    assert nested.shape == (2,)
    wide = made("nt", k="turns", v=[[1, 2], [3, 4]], object1d=False)["non_tensor_batch"]["turns"]
    assert wide.shape == (2, 2)
    assert made("meta", k="n", v="nan")["meta_info"]["n"] != 3


def test_rows_are_added_at_the_end() -> None:
    row = [[1, 1, 1, 1, 1]]
    whole = made("concat_rows", n=1, src=2, rows={"responses": row}, nt_rows={"uid": ["C"]})
    assert whole["batch"]["responses"][6].tolist() == row[0]
    assert whole["batch"]["prompts"][6].tolist() == whole["batch"]["prompts"][2].tolist()
    assert whole["non_tensor_batch"]["uid"].tolist() == list("AAABBBC")
    assert whole["non_tensor_batch"]["index"][6] == 0


def test_log_probs_under_another_temperature_or_filter() -> None:
    before = cook("T", [])["batch"]
    mask = before["response_mask"] > 0
    same = made("temper", f="old_log_probs", T=1.0)["batch"]["old_log_probs"]
    assert np.allclose(same, before["old_log_probs"])
    cold = made("temper", f="old_log_probs", T=0.5)["batch"]["old_log_probs"]
    likely = before["old_log_probs"] > np.log(0.5)
    assert (cold > before["old_log_probs"])[mask & likely].all()
    assert (cold < before["old_log_probs"])[mask & ~likely].all()
    halved = made("log_scale", f="old_log_probs", v=0.5)["batch"]["old_log_probs"]
    assert np.allclose(halved, before["old_log_probs"] / 2)
    kept = made("topp", f="old_log_probs", S=0.9)["batch"]["old_log_probs"]
    want = np.minimum(before["old_log_probs"] - np.log(0.9), 0.0)
    assert np.allclose(kept[mask], want[mask])
    garbage = [{"op": "set", "f": "values", "at": [0, 4], "v": 9.0}, {"op": "mask", "f": "values"}]
    assert cook("T", garbage)["batch"]["values"][0, 4] == 0.0


def test_what_stages_write_is_computed_again() -> None:
    plain = cook("T", [])["batch"]
    for what in ("response_mask", "position_ids", "advantages"):
        again = made("recompute", what=what)["batch"]
        assert np.allclose(again[what], plain[what])
    moved = made("recompute", what="reward_last_valid", scores=[1, 2, 3, 4, 5, 6])["batch"]
    assert moved["token_level_scores"].sum(1).tolist() == [1, 2, 3, 4, 5, 6]
    assert moved["token_level_scores"][3, 4] == 4
    batch = made("recompute", what="advantages_batch")["batch"]["advantages"]
    stride = made("recompute", what="advantages_stride")["batch"]["advantages"]
    assert np.allclose(stride, plain["advantages"])
    assert not np.allclose(batch, plain["advantages"])


@pytest.mark.parametrize(
    ("op", "said"),
    [
        ({"op": "melt"}, "unknown operation 'melt'. Known: set, add"),
        ({}, "unknown operation None"),
        ({"op": "set", "f": "values", "at": [9, 9], "v": 1}, "does not fit"),
        ({"op": "set", "f": "nothing", "at": [0], "v": 1}, "does not fit: 'nothing'"),
        ({"op": "take", "f": "*"}, "does not fit: 'idx'"),
        ({"op": "recompute", "what": "everything"}, "does not fit: 'everything'"),
        ({"op": "cast", "f": "values", "dtype": "float33"}, "does not fit"),
        ({"op": "set", "f": "values", "at": ["x:"], "v": 1}, "does not fit"),
    ],
)
def test_an_operation_that_does_not_fit_says_so(op: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match="DPA857") as caught:
        cook("T", [op])
    assert said in str(caught.value)


def test_an_unknown_base_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="Known: T, M, V"):
        cook("X", [])


def test_every_operation_is_tried_here() -> None:
    assert set(OPERATIONS) == {
        "set", "add", "mul", "replace", "zeros", "del", "copy", "take", "take_nt", "shift", "cols",
        "channels", "cast", "reshape", "transpose", "nt", "meta", "concat_rows", "temper",
        "log_scale", "topp", "mask", "recompute",
    }  # fmt: skip
