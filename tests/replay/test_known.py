"""What workers told of an update survives the renaming of a bundle."""

from copy import deepcopy

import pytest

from dataproto_audit.probes import Settings
from dataproto_audit.probes.value_terms import HOW
from dataproto_audit.replay.anonymous import Renamer
from dataproto_audit.replay.known import is_choice, is_entry
from dataproto_audit.replay.recording import Piece, Recording, audit, loud

from ._recorded import healthy

NAMES = ("loss_mode", "gate_temperatures", "attended", "lengths", "seen", "old", "eps", *HOW)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_checks_of_an_update_read_is_known(name):
    assert is_entry("losses", name)


def test_words_of_a_loss_are_choices_under_their_names_only():
    assert all(is_choice("loss_mode", mode) for mode in ("vanilla", "gspo", "sapo"))
    assert not is_choice("loss_mode", "customer-7")
    assert not is_choice("data_source", "gspo")


def test_how_a_loss_was_computed_survives():
    entries = [
        {"mini_batch": 0, "total": 0.5, "eps": 1e-3, "loss_mode": "sapo",
         "gate_temperatures": (1.0, 1.05), "split": "rows", "old": "new"},
        {"mini_batch": 1, "total": 0.5, "loss_mode": "gspo", "old": "stored"},
    ]  # fmt: skip
    batch = {"batch": {}, "non_tensor_batch": {}, "meta_info": {}}
    piece = Piece("update_actor", "after", batch, {"losses": entries})
    renamer = Renamer(Settings())
    made = renamer.recording(Recording((piece,), Settings()))
    assert made.pieces[0].evidence == {"losses": entries}
    assert not renamer.removed


def test_rows_that_see_too_little_are_still_found():
    recording = deepcopy(healthy(prompts=4, n=2, recorded=True))
    [update] = [p for p in recording.pieces if p.stage == "update_actor" and p.when == "after"]
    note = update.evidence["ranks"][0]
    told = note["attended"][0]
    told["seen"] = [told["seen"][0] - 1, *told["seen"][1:]]

    def found(which):
        return [f.rows for f in (s.finding for s in loud(audit(which))) if f.code == "DPA707"]

    assert found(recording) == [(note["indices"][0][0],)]
    assert found(Renamer(recording.settings).recording(recording)) == found(recording)
