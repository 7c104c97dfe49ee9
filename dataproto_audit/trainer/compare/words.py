"""Refusals of the engines' checks, which name keys of ``train``, in the words of layouts."""

from __future__ import annotations

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends.megatron.layout import CP, DTYPE, PP, TP, VPP

ROLES = "actor_rollout_ref"
#: Longer names stand before those they contain.
WORDS = {
    f"{ROLES}.model.use_remove_padding=true": "packed",
    f"{ROLES}.model.use_remove_padding=false": "packed=0",
    f"{ROLES}.model.use_remove_padding": "packed",
    f"{ROLES}.model.use_fused_kernels": "fused",
    DTYPE: "dtype",
    "ulysses_sequence_parallel_size": "ulysses",
    "use_distributed_optimizer=false": "distopt=0",
    "ppo_micro_batch_size_per_gpu": "rows",
    "(ppo_mini_batch_size)": "(--rows)",
    "recompute_granularity": "recompute",
    "reshard_after_forward": "reshard",
    "fsdp_config.fsdp_size": "size",
    "sequence_parallel": "sp",
    "trainer.n_gpus_per_node": "the number of ranks",
    VPP: "vpp",
    TP: "tp",
    PP: "pp",
    CP: "cp",
    f"{ROLES}.actor.strategy=fsdp2": "fsdp",
    f"{ROLES}.actor.megatron.": "",
    f"{ROLES}.actor.megatron": "megatron",
    f"{ROLES}.actor.fsdp_config.": "",
    f"{ROLES}.actor.": "",
}


def in_words(error: UsageError, layout: str) -> UsageError:
    """The same refusal for a layout of that name. What is wrong with the model's folder stays."""
    if error.code in ("DPA852", "DPA858"):
        return error
    message, remedy = error.message, error.remedy
    for key, word in WORDS.items():
        message, remedy = message.replace(key, word), remedy.replace(key, word)
    return UsageError(error.code, f"layout {layout!r}: {message}", remedy)
