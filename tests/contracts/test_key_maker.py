"""What gives row keys later keeps fingerprints, and not the batch."""

import gc
import weakref

import numpy as np
import torch

from dataproto_audit.batch import BatchView
from dataproto_audit.contracts.rows import RowState
from dataproto_audit.dump.trace_delta import StepDelta
from dataproto_audit.protocol import DataProto


def batch():
    arrays = {"uid": np.array(["a", "a", "b"], dtype=object)}
    tensors = {"responses": torch.arange(6).reshape(3, 2), "values": torch.zeros(3, 2)}
    return DataProto.from_dict(tensors, arrays)


def test_keys_are_the_same_after_the_batch_is_gone():
    made = batch()
    state = RowState(BatchView.of(made))
    keys, later = state.keys(), state.key_maker()
    left = [weakref.ref(tensor) for tensor in made.batch.values()]
    del made, state
    gc.collect()
    assert [ref() for ref in left] == [None, None]
    assert later() == keys


def test_a_snapshot_that_waits_for_the_disk_holds_what_it_counts():
    made = batch()
    snapshot = StepDelta().take("rollout", BatchView.of(made))
    sizes = [t.numel() * t.element_size() for t in made.batch.values()]
    left = [weakref.ref(tensor) for tensor in made.batch.values()]
    assert snapshot.nbytes == sum(sizes) + made.non_tensor_batch["uid"].nbytes
    del made
    gc.collect()
    assert [ref() for ref in left] == [None, None]
    assert len(snapshot.row_keys()) == 3
