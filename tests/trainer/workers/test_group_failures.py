"""What the driver sees when a rank raises, dies, comes late or runs another number of steps."""

import os
import time

import psutil
import pytest
import ray
import torch
import torch.distributed as dist

from dataproto_audit.codes import RunError, UsageError
from dataproto_audit.trainer.backends.base import ModelSpec
from dataproto_audit.trainer.workers.actor import TrainWorker
from dataproto_audit.trainer.workers.cluster import cluster
from dataproto_audit.trainer.workers.group import WorkerGroup
from dataproto_audit.trainer.workers.spec import WorkerSpec

pytestmark = pytest.mark.engine

TIMEOUT_S = 3.0
PATIENCE_S = 20.0
"""Far below gloo's own 30 minutes; the collective's time-out plus what a busy machine needs."""


def faulty_worker() -> type[TrainWorker]:
    """A worker without a model, with two collectives in ``steps``; local, so that Ray ships it."""

    class FaultyWorker(TrainWorker):
        imports = ()

        def build(self):
            from dataproto_audit.trainer.backends.device import join_process_group

            join_process_group(
                self._store,
                rank=self.rank,
                world_size=self.world_size,
                timeout_s=self.spec.collective_timeout_s,
            )
            from dataproto_audit.trainer.workers.dispatch import Place

            return {"actor": Place(self.rank, self.rank, self.world_size)}

        def hparams(self):
            return {"parameters": {}}

        def steps(self, faulty, how):
            for k in range(2):
                self._notebook.micro_batch(3, k, 2)
                if self.rank == faulty and k == 1:
                    if how == "raise":
                        raise ValueError("row 7 is bad")
                    if how == "exit":
                        os._exit(3)
                    if how == "sleep":
                        time.sleep(600)
                    if how == "fewer":
                        return self.rank
                dist.all_reduce(torch.zeros(1))
            return self.rank

        def alone(self):
            time.sleep(600)

    return FaultyWorker


@pytest.fixture(scope="module", autouse=True)
def ray_cluster():
    with cluster(num_cpus=4):
        yield


@pytest.fixture
def group():
    spec = WorkerSpec(ModelSpec("unused"), collective_timeout_s=TIMEOUT_S)
    with WorkerGroup(spec, world_size=2, worker_class=faulty_worker()) as group:
        group.build()
        assert group.call("steps", "steps", [(-1, "")]) == [0, 1]
        yield group


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def fail(group, faulty, how):
    """The error of a call in which rank ``faulty`` misbehaves; it comes soon and leaves nothing."""
    pids = list(group.pids)
    assert len(pids) == 2
    started = time.monotonic()
    with pytest.raises(RunError) as caught:
        group.call("steps", "steps", [(faulty, how)])
    assert time.monotonic() - started < PATIENCE_S
    assert not [pid for pid in pids if runs(pid)]
    with pytest.raises(RunError, match=r"DPA864 .*have been stopped"):
        group.call("steps", "steps", [(-1, "")])
    return str(caught.value)


def test_a_rank_that_raises_is_named_while_its_peer_still_waits(group):
    message = fail(group, 1, "raise")
    assert message.startswith("DPA863 steps: rank 1 raised ValueError: row 7 is bad")
    assert "in steps, test_group_failures.py:" in message


def test_a_process_that_dies_is_named_although_its_peer_fails_too(group):
    assert fail(group, 1, "exit").startswith("DPA864 steps: the process of rank 1 died")


def test_a_killed_actor_is_named(group):
    refs = [worker.execute.remote(99, "alone", "alone") for worker in group._workers]
    ray.kill(group._workers[0])
    with pytest.raises(RunError, match="DPA864 alone: the process of rank 0 died"):
        group._gather("alone", refs)


def test_a_late_rank_is_named_when_the_collective_times_out(group):
    message = fail(group, 1, "sleep")
    assert "DPA866 steps: a collective was not finished within 3 s; rank 1 did not come" in message
    assert "rank 0: steps running, mini-batch 3, micro-batch 2 of 2" in message


def test_a_rank_that_runs_fewer_micro_batches_is_named(group):
    message = fail(group, 0, "fewer")
    assert "rank 0 did not come" in message
    assert "rank 0: steps finished" in message


def test_a_call_in_which_no_rank_moves_is_given_up(group):
    with pytest.raises(RunError, match=r"(?s)DPA866 alone: .*rank 1: alone running"):
        group.call("alone", "alone", stall_s=2.0)


def test_more_ranks_than_the_cluster_holds_are_refused_at_once():
    spec = WorkerSpec(ModelSpec("unused"))
    with pytest.raises(UsageError, match="DPA854 9 ranks need"):
        WorkerGroup(spec, world_size=9, worker_class=faulty_worker())
