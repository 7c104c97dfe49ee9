import pytest
import torch

from dataproto_audit.codes import RunError
from dataproto_audit.trainer.backends.shards import checksum
from dataproto_audit.trainer.rollout.evidence import compare, join_payloads, result

TIED = {"head": "embed"}
WEIGHT = torch.arange(6, dtype=torch.float32).reshape(2, 3) / 7 - 0.3


def test_equal_tensors_have_the_checksum_of_what_was_sent():
    assert compare({"w": WEIGHT.clone()}, {"w": WEIGHT}, {}) == ({"w": checksum(WEIGHT)}, [], [])


def test_a_changed_element_is_stale_and_has_its_own_checksum():
    held = WEIGHT.clone()
    held[1, 2] += 1e-6
    sums, stale, undecided = compare({"w": held}, {"w": WEIGHT}, {})
    assert (stale, undecided) == (["w"], [])
    assert sums["w"] == checksum(held) != checksum(WEIGHT)


def test_swapped_rows_and_other_shapes_are_stale():
    for held in (WEIGHT.flip(0), WEIGHT.t().contiguous(), WEIGHT[:1]):
        assert compare({"w": held}, {"w": WEIGHT}, {})[1] == ["w"]


def test_a_half_precision_engine_is_compared_after_rounding():
    held = WEIGHT.to(torch.bfloat16)
    assert compare({"w": held}, {"w": WEIGHT}, {}) == ({"w": checksum(WEIGHT)}, [], [])
    held[0, 0] *= 1.5
    assert compare({"w": held}, {"w": WEIGHT}, {})[1] == ["w"]


def test_signed_zeros_and_denormals_are_no_difference():
    sent = torch.tensor([-0.0, 1e-40, 1.0])
    held = torch.tensor([0.0, 0.0, 1.0])
    assert compare({"w": held}, {"w": sent}, {}) == ({"w": checksum(sent)}, [], [])


def test_weights_that_are_not_finite_decide_nothing():
    sent = torch.tensor([float("nan"), 1.0])
    held = torch.tensor([float("nan"), float("nan")])
    assert compare({"w": held}, {"w": sent}, {}) == ({}, [], ["w"])


def test_a_tied_name_is_compared_with_its_original():
    sent = {"embed": WEIGHT}
    assert compare({"embed": WEIGHT, "head": WEIGHT}, sent, TIED)[1] == []
    assert compare({"embed": WEIGHT, "head": WEIGHT + 1}, sent, TIED)[1] == ["head"]


def test_names_that_were_never_sent_are_reported_but_not_stale():
    sums, stale, _ = compare({"extra": WEIGHT}, {}, {})
    assert sums == {"extra": checksum(WEIGHT)}
    assert stale == []


def test_the_result_lists_what_could_not_be_read(untied):
    payloads = tuple(untied.exports(version=7))
    sent = join_payloads(payloads)
    found = dict(sent)
    del found["lm_head.weight"]
    answer = result(payloads, sent=sent, found=found, unread=["scale"], reset=True)
    assert answer.version == 7
    assert answer.prefix_cache_reset
    assert answer.stale == []
    assert answer.unreadable == ["lm_head.weight", "scale"]
    assert set(answer.checksum) == set(found)


def test_pieces_of_any_number_of_ranks_are_joined(untied):
    for world in (1, 2, 3, 5):
        joined = join_payloads(tuple(untied.exports(world=world)))
        for name, value in untied.weights().items():
            assert joined[name].equal(value)


def test_pieces_that_do_not_fit_are_refused(untied):
    payloads = untied.exports(world=3)
    with pytest.raises(RunError, match="DPA867"):
        join_payloads(tuple(payloads[:2]))
    mixed = (*payloads[:2], untied.exports(world=3, version=2)[2])
    with pytest.raises(RunError, match=r"DPA867.*versions"):
        join_payloads(mixed)
