"""Scores that the trainer asks for after the rollout, as with a colocated reward model.

In the place of the model the reward function scores: a model would need an inference server of its
own. Which of verl's calls are made, and in which order, is as with a model.
"""

from types import ModuleType
from typing import Any

from dataproto_audit.integrations.on_import import OnImport


def unscored(module: ModuleType) -> None:
    """Agent loops are handed no scorers, as where the model has no resource pool of its own."""
    original = module.AgentLoopManager.__init__

    def __init__(
        self: Any, config: Any, worker_group: Any = None, rollout_resource_pool: Any = None,
        reward_loop_worker_handles: Any = None,
    ) -> None:  # fmt: skip
        original(self, config, worker_group, rollout_resource_pool, None)

    module.AgentLoopManager.__init__ = __init__


def asked(module: ModuleType) -> None:
    """``fit`` takes it that there is a reward model."""
    original = module.RayPPOTrainer.init_workers

    def init_workers(self: Any) -> None:
        original(self)
        self.use_rm = True

    module.RayPPOTrainer.init_workers = init_workers


OnImport("verl.experimental.agent_loop.agent_loop", unscored).install()
OnImport("verl.trainer.ppo.ray_trainer", asked).install()
