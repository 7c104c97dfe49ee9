"""The signatures of the Megatron actor's calls; nothing is computed."""

from verl.workers.tiny import cut


class mpu:
    """Ranks."""

    @staticmethod
    def get_data_parallel_rank():
        """Of one."""
        return 0

    @staticmethod
    def get_data_parallel_world_size():
        """One."""
        return 1


def rearrange_micro_batches(batch, max_token_len, dp_group=None):
    """Micro-batches and their row numbers."""
    parts = cut(batch, rows=None, tokens=max_token_len)
    return [{name: tensor[part] for name, tensor in batch.items()} for part in parts], parts


class MegatronPPOActor:
    """One rank."""

    def __init__(self, config, optimizer="adam") -> None:
        self.config, self.actor_optimizer = config, optimizer

    def compute_log_prob(self, data, calculate_entropy=False):
        """Log-probs of all rows, in one forward_backward_batch."""
        meta = data.meta_info
        self.forward_backward_batch(
            data, forward_only=True, use_dynamic_bsz=meta["use_dynamic_bsz"],
            micro_batch_size=meta["micro_batch_size"], max_token_len=meta["max_token_len"],
        )  # fmt: skip

    def make_minibatch_iterator(self, data):
        """Mini-batches."""
        return data.chunk(len(data) // self.config.ppo_mini_batch_size)

    def forward_backward_batch(
        self, data, forward_only=False, post_process_fn=None, calculate_entropy=False,
        use_dynamic_bsz=False, micro_batch_size=None, max_token_len=None, mini_batch_size=None,
    ):  # fmt: skip
        """Micro-batches."""
        if use_dynamic_bsz:
            rearrange_micro_batches(batch=data.batch, max_token_len=max_token_len)

    def update_policy(self, dataloader, enable_mtp=False):
        """One optimizer step a mini-batch."""
        config = self.config
        for mini in dataloader:
            self.forward_backward_batch(
                mini, use_dynamic_bsz=config.use_dynamic_bsz,
                micro_batch_size=config.ppo_micro_batch_size_per_gpu,
                max_token_len=config.ppo_max_token_len_per_gpu,
            )  # fmt: skip
        return {}
