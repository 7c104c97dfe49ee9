"""Rows of V1 in the order of their ids instead of their arrival, so that two runs can be compared.

What a request is answered is the same in each run, and which request is answered first is not.
"""

from types import ModuleType
from typing import Any

from dataproto_audit.integrations.on_import import OnImport


def install(module: ModuleType) -> None:
    """Sort the keys before they are balanced over ranks."""
    trainer = module.PPOTrainer
    balance = trainer._balance_batch

    def _balance_batch(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        data = module.tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["prompts", "responses"]
        )
        rows = zip(data["prompts"].unbind(), data["responses"].unbind(), strict=True)
        ids = [(prompt.tolist(), response.tolist()) for prompt, response in rows]
        batch.reorder(sorted(range(len(ids)), key=ids.__getitem__))
        return balance(self, batch, *args, **kwargs)

    trainer._balance_batch = _balance_batch


OnImport("verl.trainer.ppo.v1.trainer_base", install).install()
