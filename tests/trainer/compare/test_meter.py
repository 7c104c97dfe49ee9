import torch
import torch.distributed as dist

from dataproto_audit.trainer.compare.meter import Meter, size_of


def test_the_peak_is_what_lives_at_once_not_what_was_ever_made():
    weight = torch.zeros(100)
    with Meter({"parameters": [weight]}) as meter:
        for _ in range(5):
            made = weight + 1
            del made
        both = (weight + 1, weight + 2)
        del both
    peak = meter.usage().peak
    assert (peak["parameters"], peak["activations"]) == (400, 800)
    assert meter.usage().peak_bytes == 1200


def test_views_share_their_storage():
    with Meter({}) as meter:
        line = torch.zeros(64)
        parts = [line[k : k + 8] for k in range(8)]
        assert len(parts) == 8
    assert meter.usage().peak_bytes == 256
    assert size_of([line, *parts]) == 256


def test_a_kind_told_later_holds_for_the_past():
    weight = torch.ones(10, requires_grad=True)
    with Meter({"parameters": [weight]}) as meter:
        (weight * 2).sum().backward()
    meter.know("gradients", [weight.grad])
    assert meter.usage().peak["gradients"] in (0, 40)
    assert meter.usage().peak["parameters"] == 40


def test_nothing_is_counted_in_a_pause():
    with Meter({}) as meter, meter.paused():
        torch.zeros(1000)
    assert meter.usage().peak_bytes == 0


def test_collectives_are_counted_with_the_whole_they_work_on():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        part, whole = torch.zeros(4), torch.zeros(4)
        with Meter({}) as meter:
            dist.all_reduce(part)
            dist.all_gather_single(whole, part)
            dist.all_to_all_single(whole, part)
        usage = meter.usage()
        assert usage.calls == {"all_reduce": 1, "all_gather": 1, "all_to_all": 1}
        assert set(usage.sent.values()) == {16}
    finally:
        dist.destroy_process_group()
