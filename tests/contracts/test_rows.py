"""What a boundary remembers of its batch, and what it takes over from the boundary before."""

import numpy as np
import pytest
import torch

from dataproto_audit.batch import BatchView
from dataproto_audit.contracts.rows import RowState, alike, differing


def view(tensors=None, **arrays):
    return BatchView.of(
        {
            "batch": tensors or {},
            "non_tensor_batch": {n: np.array(v, object) for n, v in arrays.items()},
            "meta_info": {},
        }
    )


def ids(rows=4, width=3):
    return torch.arange(rows * width).reshape(rows, width)


def test_an_unwritten_batch_is_untouched():
    tensors, uid = {"prompts": ids()}, np.array(list("aabb"), object)
    batch = {"batch": tensors, "non_tensor_batch": {"uid": uid}}
    state = RowState(BatchView.of(batch))
    assert state.untouched(BatchView.of(batch))
    assert state.again().same == {"prompts", "uid"}
    assert state.same == frozenset()


@pytest.mark.parametrize("change", ["tensor in place", "array in place", "another tensor", "field"])
def test_any_change_is_noticed(change):
    tensors, uid = {"prompts": ids()}, np.array(list("aabb"), object)
    batch = {"batch": tensors, "non_tensor_batch": {"uid": uid}}
    state = RowState(BatchView.of(batch))
    if change == "tensor in place":
        tensors["prompts"][2, 1] = 77
    elif change == "array in place":
        uid[[1, 2]] = uid[[2, 1]]
    elif change == "another tensor":
        tensors["prompts"] = ids() + 1
    else:
        tensors["responses"] = ids()
    later = BatchView.of(batch)
    assert not state.untouched(later)
    fields = set(later.names) - set(RowState(later, state).same)
    assert fields == {
        "uid" if "array" in change else "responses" if change == "field" else "prompts"
    }


def test_a_write_in_place_does_not_spoil_what_was_seen_before():
    tensor = ids()
    state = RowState(view({"prompts": tensor}))
    tensor[1] = 0
    later = RowState(view({"prompts": tensor}), state)
    assert np.flatnonzero(state.hashes("prompts") != later.hashes("prompts")).tolist() == [1]


def test_copies_with_the_same_rows_are_the_same():
    state = RowState(view({"prompts": ids()}, uid=list("aabb"), raw=[[1], [2], [3], [4]]))
    copied = view({"prompts": ids().clone()}, uid=list("aabb"), raw=[[1], [2], [3], [4]])
    assert RowState(copied, state).same == {"prompts", "uid", "raw"}


def test_tensors_that_do_not_count_writes_are_looked_at_each_time():
    with torch.inference_mode():
        frozen = ids() + 0
    array = ids().numpy().copy()
    batch = {"batch": {"a": frozen, "b": array}}
    state = RowState(BatchView.of(batch))
    assert not state.untouched(BatchView.of(batch))
    array[0, 0] = 9
    assert RowState(BatchView.of(batch), state).same == {"a"}


def test_keys_are_distinct_and_stay_with_their_row():
    tensors = {"prompts": torch.tensor([[1], [1], [2]]), "responses": torch.tensor([[5], [5], [6]])}
    keys = RowState(view(tensors, uid=["u", "u", "v"])).keys()
    assert len(set(keys)) == 3
    assert keys[0].removesuffix("/0") == keys[1].removesuffix("/1")
    order = [2, 0, 1]
    moved = {name: tensor[order] for name, tensor in tensors.items()}
    assert RowState(view(moved, uid=["v", "u", "u"])).keys() == tuple(keys[i] for i in order)


def test_keys_without_responses_or_uids():
    assert RowState(view(uid=["u", "u"])).keys() == ("u/0", "u/1")
    assert RowState(view({"a": ids(2)})).keys() == ("-/0", "-/1")
    assert RowState(view({"a": ids(2)})).keys(["x", "y"]) == ("x/0", "y/0")
    assert RowState(view(uid=[7, [1]])).keys() == ("7/0", "[1]/0")


def test_a_field_of_other_rows_is_not_whole():
    state = RowState(BatchView.of({"batch": {"a": ids(4), "b": ids(4), "c": ids(2)}}))
    assert [state.whole(name) for name in "abc"] == [True, True, False]


def test_fingerprints_are_of_the_bag_of_rows():
    one, two = ids(), ids()[[1, 0, 3, 2]]
    states = [RowState(view({"a": tensor})) for tensor in (one, two, one + 1)]
    first, second, third = (state.fingerprint("a") for state in states)
    assert first == second != third
    assert RowState(view(uid=["x"])).fingerprint("uid") == ""


class Stubborn:
    def __eq__(self, other):
        raise RuntimeError("not comparable")

    __hash__ = None  # type: ignore[assignment]


def test_differing_positions():
    same = Stubborn()
    assert list(differing([1, "a", same], [1, "b", same])) == [1]
    assert list(differing([np.ones(2), float("nan")], [np.ones(2), float("nan")])) == []
    assert list(differing([Stubborn()], [Stubborn()])) == []
    assert not alike([1], [1, 2])
    assert alike([np.ones(3)], [np.ones(3)])
