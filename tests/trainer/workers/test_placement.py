"""What each rank reserves, on clusters that a test can only describe."""

from types import SimpleNamespace

import pytest

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.workers import placement


@pytest.fixture
def reserve(monkeypatch):
    """Reserves on a cluster of the given resources; returns what was asked of Ray."""

    def reserved(world_size, *, wait=True, **resources):
        asked = []
        group = SimpleNamespace(wait=lambda timeout: wait)
        monkeypatch.setattr(placement.ray, "cluster_resources", lambda: resources)
        monkeypatch.setattr(
            placement, "placement_group", lambda bundles, strategy: asked.append(bundles) or group
        )
        monkeypatch.setattr(placement, "remove_placement_group", asked.append)
        placed = placement.place(world_size)
        return placed.gpus, asked[0]

    return reserved


def test_without_gpus_a_rank_takes_a_cpu(reserve):
    assert reserve(2, CPU=8.0) == (0.0, [{"CPU": 1.0}, {"CPU": 1.0}])


def test_with_gpus_each_rank_takes_one(reserve):
    assert reserve(1, CPU=8.0, GPU=1.0) == (1.0, [{"CPU": 1.0, "GPU": 1.0}])
    assert reserve(2, CPU=8.0, GPU=4.0) == (1.0, [{"CPU": 1.0, "GPU": 1.0}] * 2)


def test_more_ranks_than_gpus_are_refused_with_the_key_to_set(reserve):
    with pytest.raises(UsageError, match=r"2 ranks need .*'GPU': 2.* has \{'GPU': 1") as caught:
        reserve(2, CPU=8.0, GPU=1.0)
    assert caught.value.code == "DPA854"
    assert "trainer.n_gpus_per_node" in caught.value.remedy


def test_a_cluster_that_is_busy_is_told(reserve):
    with pytest.raises(UsageError, match="DPA854 no room for 2 ranks"):
        reserve(2, wait=False, CPU=8.0)
