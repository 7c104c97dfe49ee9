import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto_audit.codes import UsageError
from dataproto_audit.protocol import DataProto
from dataproto_audit.trainer.prompts import object_array
from dataproto_audit.trainer.rollout.base import Generation, split
from dataproto_audit.trainer.rollout.rows import Widths, positions, to_batch, to_requests

WIDTHS = Widths(prompt=5, response=3, pad_id=0)
A, B, C = [1, 7], [1, 8, 9], [1, 7, 7, 7, 7]


def batch(prompts, uids=None):
    arrays = {"prompt_ids": object_array(prompts)}
    if uids is not None:
        arrays["uid"] = object_array(list(uids))
    return DataProto.from_dict({"dummy": torch.zeros(len(prompts), 1)}, non_tensors=arrays)


def requests(prompts, uids=None):
    made = to_requests(batch(prompts, uids), WIDTHS)
    return split(made.tokens_T, made.length_K), made.count_K.tolist()


def test_runs_of_one_uid_become_one_request():
    assert requests([A, A, A, B, B, C], "xxxyyz") == ([A, B, C], [3, 2, 1])


def test_only_adjacent_rows_are_collapsed():
    assert requests([A, B, A, B], "xyxy") == ([A, B, A, B], [1, 1, 1, 1])


def test_rows_of_one_uid_with_other_prompts_stay_their_own():
    assert requests([A, A, B], "xxx") == ([A, B], [2, 1])


def test_without_uids_every_row_is_a_request():
    assert requests([A, A]) == ([A, A], [1, 1])


def test_prompts_are_padded_left():
    made = to_requests(batch([A, A, C], "xxy"), WIDTHS)
    assert made.prompts_BP.tolist() == [[0, 0, 0, 1, 7], [0, 0, 0, 1, 7], C]
    assert made.mask_BP.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 1, 1], [1] * 5]


def test_padded_tensors_are_read_without_their_padding():
    prompts = torch.tensor([[0, 0, 1, 7], [1, 8, 9, 9]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    made = to_requests(DataProto.from_dict({"prompts": prompts, "attention_mask": mask}), WIDTHS)
    assert split(made.tokens_T, made.length_K) == [[1, 7], [1, 8, 9, 9]]
    assert made.prompts_BP.shape == (2, 5)


def test_prompts_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match=r"DPA853.*row 1.*6 tokens"):
        requests([A, [1] * 6])
    with pytest.raises(UsageError, match=r"DPA857.*row 1.*empty"):
        requests([A, []])


def generation(lengths, width):
    rng = np.random.default_rng(0)
    tokens = np.zeros((len(lengths), width), np.int32)
    log_probs = np.zeros((len(lengths), width), np.float32)
    for row, size in enumerate(lengths):
        tokens[row, :size] = rng.integers(3, 9, size)
        log_probs[row, :size] = -rng.random(size)
    stopped = np.array([size < width for size in lengths])
    return Generation(tokens, np.array(lengths, np.int32), log_probs, stopped, {"n": 1})


def test_an_answer_becomes_rows():
    made = generation([2, 1, 2], 2)
    out = to_batch(to_requests(batch([A, A, B], "xxy"), WIDTHS), made, WIDTHS)
    tensors = out.batch
    assert tensors["responses"].shape == (3, 3)
    assert tensors["input_ids"][2].tolist() == [0, 0, 1, 8, 9, *made.tokens_NW[2].tolist(), 0]
    assert tensors["attention_mask"].tolist()[1] == [0, 0, 0, 1, 1, 1, 0, 0]
    assert tensors["position_ids"].tolist()[1] == [0, 0, 0, 0, 1, 2, 2, 2]
    assert tensors["response_mask"].tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 0]]
    assert tensors["rollout_log_probs"].dtype == torch.float32
    assert (tensors["rollout_log_probs"][tensors["response_mask"] == 0] == 0).all()
    assert out.non_tensor_batch["finish_reason"].tolist() == ["length", "stop", "length"]
    assert out.meta_info == {"sampling": {"n": 1}}
    ids = ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask")
    assert all(tensors[name].dtype == torch.int64 for name in ids)


def test_longer_answers_than_planned_widen_the_response():
    out = to_batch(to_requests(batch([A]), WIDTHS), generation([4], 4), WIDTHS)
    assert out.batch["responses"].shape == (1, 4)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=6))
def test_rows_keep_what_the_engine_said(sizes):
    prompts = [[1] + [5] * (size - 1) for size, _ in sizes]
    made = generation([size for _, size in sizes], max(size for _, size in sizes))
    out = to_batch(to_requests(batch(prompts), WIDTHS), made, WIDTHS).batch
    mask, both = out["attention_mask"].bool(), torch.cat([out["prompts"], out["responses"]], 1)
    assert out["input_ids"].equal(both)
    assert (both[~mask] == WIDTHS.pad_id).all()
    for row, (size, made_size) in enumerate(sizes):
        assert mask[row].sum() == size + made_size
        assert out["position_ids"][row][mask[row]].tolist() == list(range(size + made_size))
        assert (
            both[row][mask[row]].tolist() == prompts[row] + made.tokens_NW[row][:made_size].tolist()
        )


def test_positions_of_a_row_without_tokens_are_zero():
    assert positions(np.zeros((1, 3), np.int64)).tolist() == [[0, 0, 0]]
