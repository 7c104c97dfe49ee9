"""DataProto between Ray processes: both encodings, futures, and a gather over two ranks."""

import os

import pytest
import torch

from dataproto_audit.protocol import DataProto, DataProtoFuture, all_gather_data_proto
from dataproto_audit.trainer.workers.cluster import cluster

pytestmark = pytest.mark.engine
METHOD = "VERL_DATAPROTO_SERIALIZATION_METHOD"


def make_batch(rows, first=0, width=3):
    tensors = {"x": torch.arange(rows * width).reshape(rows, width) + first}
    tensors["half"] = torch.ones(rows, 2, dtype=torch.bfloat16)
    uids = [f"u{first + i}" for i in range(rows)]
    return DataProto.from_dict(tensors, {"uid": uids}, {"temperature": 1.0})


@pytest.fixture(scope="module")
def ray():
    import ray

    with cluster(num_cpus=2):
        yield ray


@pytest.mark.parametrize("method", ["torch", "numpy"])
@pytest.mark.parametrize("width", [3, 100_000])  # inline, and through the object store
def test_batches_travel_and_are_writable(ray, monkeypatch, method, width):
    monkeypatch.setenv(METHOD, method)
    batch = make_batch(4, width=width)

    @ray.remote
    def add_one(data):
        os.environ[METHOD] = method
        data.batch["x"] += 1  # the store's own memory is read-only
        return data

    back = ray.get(add_one.remote(batch))
    assert back.batch["x"].equal(batch.batch["x"] + 1)
    back.batch["x"] -= 1
    assert back == batch


def test_futures_are_joined_by_the_receiver(ray):
    @ray.remote
    def produce(first):
        return make_batch(2, first)

    @ray.remote
    def consume(future):
        return future.get()

    future = DataProtoFuture.concat([produce.remote(0), produce.remote(2)])
    whole = future.get()
    assert whole == DataProto.concat([make_batch(2), make_batch(2, first=2)])
    assert ray.get([consume.remote(part) for part in future.chunk(2)]) == whole.chunk(2)


def test_ranks_gather_each_others_rows(ray, tmp_path):
    @ray.remote
    def rank_work(rank, meeting_point):
        store = torch.distributed.FileStore(meeting_point, 2)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
        batch = make_batch(2, first=2 * rank)
        all_gather_data_proto(batch, torch.distributed.group.WORLD)
        torch.distributed.destroy_process_group()
        return batch

    both = ray.get([rank_work.remote(rank, str(tmp_path / "store")) for rank in (0, 1)])
    assert both[0] == both[1] == DataProto.concat([make_batch(2), make_batch(2, first=2)])
