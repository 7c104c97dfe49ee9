"""Fields of other frameworks: names, alignment, and what their READMEs call healthy or faulty."""

import json

import pytest
import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.dump.readers import read_batches, read_folder
from dataproto_audit.dump.readers.framework_table import FRAMEWORKS


def field(saved, name):
    return [row.tolist() for row in saved.tensors[name].unbind()]


def lengths(saved, name):
    return [len(row) for row in saved.tensors[name].unbind()]


def test_every_entry_of_the_table_is_read_from_a_sample(samples):
    seen = {(s.framework, s.hint.stage, s.hint.when) for s in read_folder(samples).saved}
    assert seen >= {(known.name, known.stage, known.when) for known in FRAMEWORKS}


@pytest.mark.parametrize("kind", ["experiences.pt", "experiences_dict.pt"])
def test_openrlhf_columns_move_by_one(kind, samples):
    saved = read_batches(samples / "openrlhf/healthy" / kind)
    assert [s.place for s in saved] == ["[0]", "[1]", "[2]", "[3]"]
    first = saved[0]
    theirs = torch.load(samples / "openrlhf/healthy/experiences_dict.pt", weights_only=True)[0]
    for row, tokens in enumerate(field(first, "responses")):
        end = 1 + len(tokens)
        assert tokens == theirs["sequences"][row, 1:end].tolist()
        assert field(first, "response_mask")[row] == theirs["action_mask"][row, : end - 1].tolist()
    assert list(first.arrays["score"]) == theirs["rewards"].tolist()
    # A sampled token has a log-prob, and the last one is trained.
    for mask, values in zip(
        field(first, "response_mask"), field(first, "rollout_log_probs"), strict=True
    ):
        assert [bool(bit) for bit in mask] == [value != 0 for value in values]


def test_openrlhf_fault_is_visible(samples):
    saved = read_batches(samples / "openrlhf/fault_action_mask_shift/experiences.pt")
    masks = [mask for s in saved for mask in field(s, "response_mask")]
    values = [value for s in saved for value in field(s, "rollout_log_probs")]
    off = [
        row
        for row, (mask, value) in enumerate(zip(masks, values, strict=True))
        if any(bit and not v for bit, v in zip(mask, value, strict=True))
    ]
    assert off == [2, 13]


def test_nemo_rl_keeps_what_the_split_cuts_off(samples):
    (saved,) = read_batches(samples / "nemo_rl/fault_mask_covers_prompt/train_data_step1.jsonl")
    assert saved.hint.step == 1
    wrong = [
        row
        for row, (mask, value) in enumerate(
            zip(field(saved, "response_mask"), field(saved, "rollout_log_probs"), strict=True)
        )
        if any(bit and not v for bit, v in zip(mask, value, strict=True))
    ]
    assert wrong == [1, 5]
    assert saved.arrays["token_loss_mask"][1][0] == 1  # the first prompt token, too
    (healthy,) = read_batches(samples / "nemo_rl/healthy/train_data_step1.jsonl")
    assert "token_loss_mask" not in healthy.arrays


def test_nemo_rl_skipped_forward_is_no_log_prob(samples):
    path = samples / "nemo_rl/healthy_force_on_policy_zero_prev/train_data_step1.jsonl"
    (saved,) = read_batches(path)
    assert "old_log_probs" not in saved.tensors
    assert "prev_logprobs" in saved.arrays
    assert any("not computed" in note for note in saved.notes)


def test_wrong_lengths_stay_visible(samples):
    name = "run1_rollouts_000000.jsonl"
    (saved,) = read_batches(samples / "open_instruct/fault_logprobs_len" / name)
    more = [
        a - b
        for a, b in zip(
            lengths(saved, "rollout_log_probs"), lengths(saved, "responses"), strict=True
        )
    ]
    assert {row: extra for row, extra in enumerate(more) if extra} == {2: -1, 10: 1}
    (saved,) = read_batches(samples / "slime/fault_loss_mask_len/rollout_data/0.pt")
    more = [
        a - b
        for a, b in zip(lengths(saved, "response_mask"), lengths(saved, "responses"), strict=True)
    ]
    assert {row: extra for row, extra in enumerate(more) if extra} == {2: 1, 6: -1}


def test_slime_score_is_the_raw_reward(samples):
    (train,) = read_batches(samples / "slime/healthy/train_data/0.pt")
    (rollout,) = read_batches(samples / "slime/healthy/rollout_data/0.pt")
    assert list(train.arrays["score"]) == list(rollout.arrays["score"])
    assert set(train.arrays["rewards"]) != set(train.arrays["score"])
    assert rollout.arrays["uid"].tolist() == [group for group in range(4) for _ in range(4)]
    for mine, other in zip(field(train, "responses"), field(rollout, "responses"), strict=True):
        assert mine == other
    assert (rollout.hint.stage, train.hint.stage) == ("reward", "update_actor")


def test_prime_rl_spreads_trained_tokens_over_the_mask(samples):
    folder = samples / "prime_rl/healthy"
    (saved,) = read_batches(folder / "rollouts/step_1/train/effective/traces.jsonl")
    for mask, value in zip(
        field(saved, "response_mask"), field(saved, "rollout_log_probs"), strict=True
    ):
        assert len(mask) == len(value)
        assert all(v == 0 for bit, v in zip(mask, value, strict=True) if not bit)
    assert any(0 in mask for mask in field(saved, "response_mask"))  # tool tokens
    groups = list(saved.arrays["uid"])
    assert sorted(set(groups)) == ["g0", "g1", "g2", "g3"]
    (exported,) = read_batches(folder / "token_exports/step_1/rank_0.jsonl")
    whole = [p + r for p, r in zip(field(saved, "prompts"), field(saved, "responses"), strict=True)]
    assert field(exported, "input_ids") == whole


def test_prime_rl_lists_of_another_length_than_the_mask(samples, tmp_path):
    path = samples / "prime_rl/healthy/rollouts/step_1/train/effective/traces.jsonl"
    episode = json.loads(path.read_text().splitlines()[0])
    node = episode["traces"][0]["nodes"][1]
    node["logprobs"].pop()
    node["advantages"].append(9.0)
    (tmp_path / "traces.jsonl").write_text(json.dumps(episode))
    (saved,) = read_batches(tmp_path / "traces.jsonl")
    assert lengths(saved, "responses") == [3]
    assert lengths(saved, "rollout_log_probs") == [2]
    assert lengths(saved, "advantages") == [4]


def test_prime_rl_circles_are_refused(tmp_path):
    nodes = [{"parent": 0, "sampled": True, "token_ids": [1], "mask": [True]}] * 2
    line = {"env": {}, "traces": [{"nodes": [*nodes, {**nodes[0], "parent": 1}]}]}
    (tmp_path / "t.jsonl").write_text(json.dumps(line))
    with pytest.raises(UsageError, match="form a circle"):
        read_batches(tmp_path / "t.jsonl")


def test_text_only_files(samples):
    (areal,) = read_batches(samples / "areal/fault_task_written_twice/rollout/3/1.jsonl")
    keys = list(zip(areal.arrays["uid"], areal.arrays["sample_idx"], strict=True))
    assert len(keys) - len(set(keys)) == 4
    (trl,) = read_batches(samples / "trl/healthy/completions/completions_00002.parquet")
    assert (trl.kind, trl.rows, trl.hint.step) == ("parquet", 32, 2)
    assert trl.arrays["raw_prompt"][0] == "7-6="
    assert {"exact_match", "advantage", "completion"} <= trl.arrays.keys()
    (dump,) = read_batches(samples / "verl-0.9.1/v1_tool/rollout_dump/1.jsonl")
    assert dump.arrays["store_key"][0].startswith(dump.arrays["uid"][0] + "_")
    (other,) = read_batches(samples / "verl-0.7.1/rpp/rollout_dump/1.jsonl")
    assert "store_key" not in other.arrays


def test_rows_of_several_steps_and_unknown_rows(tmp_path):
    rows = [
        {"input": "a", "output": "b", "score": 1.0, "step": step, "uid": "u"} for step in (1, 2, 2)
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    first, second = read_batches(tmp_path / "x.jsonl")
    assert (first.place, first.rows, second.hint.step, second.rows) == ("step 1", 1, 2, 2)
    ours = [{"responses": [1, 2], "response_mask": [1, 1], "who": "x"}, {"responses": []}]
    (tmp_path / "y.jsonl").write_text("\n".join(map(json.dumps, ours)))
    (saved,) = read_batches(tmp_path / "y.jsonl")
    assert field(saved, "responses") == [[1, 2], []]
    assert list(saved.arrays["who"]) == ["x", None]
    assert saved.framework == "unknown"


@pytest.mark.parametrize(
    ("row", "fragment"),
    [
        ({"token_ids": [["a"]], "token_loss_mask": [[1]], "input_lengths": [1]}, "no list of"),
        ({"token_ids": [[1]], "token_loss_mask": [[1]], "input_lengths": [9]}, "no length of"),
        ({"token_ids": [[1]], "token_loss_mask": [[1], [1]], "input_lengths": [1]}, "different"),
        ({"prompt_tokens": [1], "response_tokens": 3, "reward": 1}, "row 0: response_tokens"),
    ],
)
def test_rows_that_do_not_fit_their_format(row, fragment, tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    with pytest.raises(UsageError, match=fragment):
        read_batches(tmp_path / "x.jsonl")
