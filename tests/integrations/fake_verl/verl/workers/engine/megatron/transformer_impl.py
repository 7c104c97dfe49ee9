"""The signatures of the Megatron engine's calls; nothing is computed."""

from types import SimpleNamespace

from verl.workers.engine.fsdp.transformer_impl import prepare_micro_batches as _split


def prepare_micro_batches(data, dp_group=None, num_batches_divided_by=None,
                          same_micro_num_in_dp=True, min_num_micro_batch=None):  # fmt: skip
    """Micro-batches and their row numbers."""
    return _split(data)


class MegatronEngine:
    """One rank."""

    def __init__(self) -> None:
        self.engine_config = SimpleNamespace(context_parallel_size=1)

    def get_data_parallel_rank(self):
        """Of one."""
        return 0

    def get_data_parallel_size(self):
        """One."""
        return 1

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        """Micro-batches."""
        prepare_micro_batches(data=data)

    def optimizer_step(self):
        """A step."""
        return 1.0
