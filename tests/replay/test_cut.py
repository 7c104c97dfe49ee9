"""A part of a healthy step is a healthy step; what was wrong stays wrong."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dataproto_audit.probes import Settings
from dataproto_audit.protocol import DataProto
from dataproto_audit.replay.cut import Whole, sizes
from dataproto_audit.replay.recording import Recording, audit, loud, piece_of, with_settings
from dataproto_audit.testing.layouts import jagged

from ._recorded import healthy, lone, sides

LAYOUT = dict.fromkeys(
    ("n", "world_size", "cp_size", "micro_batch_size", "actor_micro_batch_size", "max_token_len")
)
FORMS = {
    "grpo": {}, "rloo": {"estimator": "rloo"}, "mean only": {"norm_by_std": False},
    "gae": {"critic": True}, "kl in reward": {"kl_in_reward": True, "step": 30},
    "tools": {"multi_turn": True}, "rpp": {"estimator": "reinforce_plus_plus"},
    "opo": {"estimator": "opo"}, "remax": {"estimator": "remax"},
    "half": {"dtype": "bfloat16"}, "channels": {"channels": 4},
    "entropy": {"entropy": True}, "mini-batches": {"mini_batches": 2},
}  # fmt: skip


def step(**options):
    base = {"prompts": 6, "n": 4, "response_width": 8, "step": 2, "ranks": 1, **options}
    return with_settings(healthy(**base), **LAYOUT)


def told(recording):
    return {(s.finding.code, s.finding.stage, s.finding.field) for s in loud(audit(recording))}


@pytest.mark.parametrize("form", list(FORMS))
def test_whole_groups_and_all_columns_stay_healthy(form):
    whole = Whole(step(**FORMS[form]))
    cut = replace(whole.everything, samples=frozenset(range(8, 20)))
    made = whole.cut(cut)
    assert made.view.rows == 12
    assert told(made) == set()


@pytest.mark.parametrize("form", [f for f in FORMS if f not in ("gae", "rpp")])
def test_rows_and_columns_stay_healthy(form):
    """Rows out of groups, the last columns of prompt padding, and one that all rows have."""
    whole = Whole(step(**FORMS[form]))
    attended = whole.recording.view.numpy("attention_mask")
    width = whole.widths.prompt
    used = [c for c in range(width) if attended[:, c].any()]
    cut = replace(whole.everything, samples=frozenset((0, 1, 5, 9, 10)), prompt=tuple(used[1:]))
    assert told(whole.cut(cut)) == set()


@pytest.mark.parametrize("name", ["grpo", "gae", "kl in reward", "half", "channels"])
def test_everything_is_the_recording_itself(name):
    recording = step(**FORMS[name])
    made = Whole(recording).cut(Whole(recording).everything)
    for old, new in zip(recording.pieces, made.pieces, strict=True):
        for field, tensor in old.batch["batch"].items():
            assert torch.equal(new.batch["batch"][field], tensor), field
        assert new.evidence.keys() == old.evidence.keys()


def test_the_score_moves_to_the_new_last_token():
    whole = Whole(step())
    view = whole.recording.view
    length = int((view.numpy("attention_mask")[:, whole.widths.prompt :] != 0).sum(1).max())
    cut = replace(whole.everything, response=tuple(range(length - 2)))
    made = whole.cut(cut).view
    before, after = view.numpy("token_level_scores"), made.numpy("token_level_scores")
    assert np.allclose(before.sum(1), after.sum(1))
    last = (made.numpy("attention_mask")[:, whole.widths.prompt :] != 0).sum(1) - 1
    assert (after.nonzero()[1] == last[after.any(1)]).all()


def test_positions_and_counts_are_taken_again():
    whole = Whole(step())
    cut = replace(whole.everything, prompt=tuple(range(2, whole.widths.prompt)))
    made = whole.cut(cut)
    view = made.view
    text = np.maximum(view.numpy("attention_mask").cumsum(1) - 1, 0)
    assert np.array_equal(view.numpy("position_ids"), text)
    counts = view.meta["global_token_num"]
    assert counts == view.numpy("attention_mask").sum(1).tolist()
    prompts = made.pieces[0].batch["non_tensor_batch"]["prompt_ids"]
    assert max(map(len, prompts)) <= whole.widths.prompt - 2


def test_wrong_cells_stay_wrong_by_as_much():
    bad, _, _ = sides("positions_from_one")
    whole = Whole(with_settings(bad, **LAYOUT))
    made = whole.cut(replace(whole.everything, samples=frozenset((1, 2)), response=(0, 1))).view
    text = np.maximum(made.numpy("attention_mask").cumsum(1) - 1, 0)
    distance = (made.numpy("position_ids") - text)[made.numpy("attention_mask") != 0]
    assert set(distance.tolist()) == {1}


def test_losses_and_rank_notes_follow():
    whole = Whole(step(mini_batches=2))
    made = whole.cut(replace(whole.everything, samples=frozenset(range(10))))
    [update] = [p for p in made.pieces if p.stage == "update_actor" and p.when == "after"]
    tensors = update.batch["batch"]
    for number, loss in enumerate(update.evidence["losses"]):
        rows = tensors["mini_batch"] == number
        assert loss["normaliser"] == float(tensors["response_mask"][rows].sum())
    [note] = update.evidence["ranks"]
    assert note["rows"] == 10
    assert sorted(i for micro in note["indices"] for i in micro) == list(range(10))
    assert note["tokens"] == int(tensors["attention_mask"].sum()) == sum(note["micro_batches"])


SHAPES = ("one_tensor_not_balanced", "mask_as_floats", "log_probs_one_column_short",
          "raw_prompt_not_repeated")  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_wrong_with_a_shape_survives_a_cut(name):
    bad, _, _ = sides(name)
    bad = with_settings(bad, **{k: None for k in LAYOUT if k != "n"})
    whole = Whole(bad)
    first = loud(audit(bad))[0]
    made = whole.cut(replace(whole.everything, samples=frozenset(range(16))))
    assert first.target in {s.target for s in audit(made)}


def test_a_jagged_batch_is_laid_out():
    recording = lone(step(), "advantage")
    parts = recording.pieces[0].batch
    batch = DataProto.from_dict(parts["batch"], parts["non_tensor_batch"], parts["meta_info"])
    whole = Whole(replace(recording, pieces=(piece_of(jagged(batch)),)))
    assert whole.recording.view.layout == "padded"
    assert sizes(whole.recording) == sizes(recording)


def test_tokens_of_a_batch_without_ids_and_masks():
    """As shrinking leaves it: the cells of its largest field."""
    left = {"old_log_probs": torch.zeros(2, 3), "response_mask": torch.ones(2, 3)}
    assert sizes(Recording((piece_of(DataProto.from_dict(left)),), Settings()))["tokens"] == 6
