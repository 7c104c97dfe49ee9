import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.testing._internal.distributed.fake_pg import FakeStore

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


def test_functional_collectives_and_lists_of_pieces_are_counted_alike():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        name, ops, part = dist.group.WORLD.group_name, torch.ops._c10d_functional, torch.zeros(4)
        pieces = [torch.zeros(4), torch.zeros(4)]
        with Meter({}) as meter:
            ops.wait_tensor(ops.all_reduce(part, "sum", name))
            ops.wait_tensor(ops.all_gather_into_tensor(part, 2, name))
            ops.wait_tensor(ops.reduce_scatter_tensor(part, "sum", 2, name))
            ops.wait_tensor(ops.all_to_all_single(part, [2, 2], [2, 2], name))
        whole = {"all_reduce": 16, "all_gather": 32, "reduce_scatter": 16, "all_to_all": 16}
        assert meter.usage().calls == dict.fromkeys(whole, 1)
        assert meter.usage().sent == whole
        with Meter({}) as meter:
            dist.all_gather(pieces, part)
        assert meter.usage().sent == {"all_gather": 32}
        with Meter({}) as meter:
            whole = functional.all_reduce(part, "sum", dist.group.WORLD) + 1
        assert (meter.usage().sent, whole.shape) == ({"all_reduce": 16}, (4,))
        # The argument, what was sent and the sum: the wrapper that waits is none of them.
        assert meter.usage().peak_bytes == 3 * 16
    finally:
        dist.destroy_process_group()
