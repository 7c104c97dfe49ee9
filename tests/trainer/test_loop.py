"""Which stages a run goes through; the loop itself is run by the engine tests."""

import pytest

from dataproto_audit.trainer.config import load_config
from dataproto_audit.trainer.loop import STAGES, stages_of


@pytest.mark.parametrize(
    ("overrides", "left_out"),
    [
        (("trainer.test_freq=5",), set()),
        (("trainer.test_freq=-1", "trainer.val_before_train=true"), set()),
        (("trainer.test_freq=-1", "trainer.val_before_train=false"), {"validation"}),
        (("trainer.test_freq=5", "actor_rollout_ref.actor.use_kl_loss=false"), {"ref_log_prob"}),
    ],
)
def test_only_stages_that_run_are_announced(overrides, left_out):
    stages = stages_of(load_config("quickstart", list(overrides)))
    assert list(stages) == [stage for stage in STAGES if stage not in left_out]
