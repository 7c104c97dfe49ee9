"""Bypass and rollout correction."""


def apply_bypass_mode(batch, rollout_corr_config=None, policy_loss_config=None) -> None:
    """Old log-probs are those of the rollout."""
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]


def compute_rollout_correction_and_add_to_batch(batch, rollout_corr_config):
    """Reject a row: its mask becomes 0."""
    mask = batch.batch["response_mask"].clone()
    if rollout_corr_config.get("rollout_rs"):
        mask[0] = 0
    batch.batch["response_mask"] = mask
    return batch, {"rollout_corr/kl": 0.0}
