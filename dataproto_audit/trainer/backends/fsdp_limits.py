"""What the FSDP backend cannot do, said before anything starts: layouts, packing, offload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends.base import FSDPOptions, ModelSpec
from dataproto_audit.trainer.backends.hf import reason, unfit
from dataproto_audit.trainer.backends.scoring import FAMILIES, check_family
from dataproto_audit.trainer.model_config import REMEDY

MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"


def check_layout(model: ModelSpec, options: FSDPOptions, *, world_size: int, device: str) -> None:
    """Raise DPA854 for sizes that do not divide the ranks, DPA851 for combinations that do not
    work. ``device`` is ``cpu`` or ``cuda``."""
    size = options.fsdp_size
    if size != -1 and (size < 1 or world_size % size):
        raise UsageError(
            "DPA854",
            f"{ACTOR}.fsdp_config.fsdp_size={size} does not divide {world_size} ranks.",
            "Use a divisor of the number of ranks, or -1 for all of them.",
        )
    _check_reshard(options, sharded=world_size if size == -1 else size)
    shared = options.sequence_parallel
    if shared < 1 or world_size % shared:
        raise UsageError(
            "DPA854",
            f"{ACTOR}.ulysses_sequence_parallel_size={shared} does not divide {world_size} ranks.",
            "Use a divisor of the number of ranks.",
        )
    if shared > 1 and not model.remove_padding:
        raise UsageError(
            "DPA851",
            f"{ACTOR}.ulysses_sequence_parallel_size={shared} shares packed rows over ranks, but "
            f"{MODEL}.use_remove_padding is off.",
            f"Set {MODEL}.use_remove_padding=true.",
        )
    if options.offload and device == "cpu":
        raise UsageError(
            "DPA851",
            f"{ACTOR}.fsdp_config.offload_policy moves weights from the accelerator to the host, "
            "and this machine has no accelerator: torch refuses it.",
            "Set it to false; on CPUs everything is in host memory.",
        )


def _check_reshard(options: FSDPOptions, *, sharded: int) -> None:
    reshard = options.reshard_after_forward
    if reshard is None or isinstance(reshard, bool):
        return
    if not isinstance(reshard, int):
        raise UsageError(
            "DPA851",
            f"{ACTOR}.fsdp_config.reshard_after_forward is {reshard!r}.",
            "Use true, false, or a number of ranks.",
        )
    if not 1 < reshard < sharded or sharded % reshard:
        raise UsageError(
            "DPA854",
            f"{ACTOR}.fsdp_config.reshard_after_forward={reshard} is no part of {sharded} ranks "
            "that share the weights.",
            f"Use true, false, or a divisor of {sharded} between 1 and {sharded}.",
        )


def check_model(model: ModelSpec, options: FSDPOptions, config: Mapping[str, Any]) -> None:
    """Raise DPA851 for a model that the options do not know, DPA854 for heads that do not divide.

    ``config`` is what :func:`..model_config.read_config` gave. DPA852 if transformers knows no
    causal language model of its type, or does not take its values.
    """
    _known_to_transformers(config)
    on = [
        f"{MODEL}.{key}"
        for key, wanted in (
            ("use_remove_padding", model.remove_padding),
            ("use_fused_kernels", model.fused_kernels),
        )
        if wanted
    ] + (["a value head"] if model.values else [])
    if not on:
        return
    slides = bool(config.get("use_sliding_window")) and bool(config.get("sliding_window"))
    check_family(
        str(config.get("model_type")), keys=" and ".join(on),
        sliding_window=slides and model.remove_padding,
    )  # fmt: skip
    if model.remove_padding and config.get("attention_dropout"):
        raise UsageError(
            "DPA851",
            f"the model has attention_dropout {config['attention_dropout']}, which packed rows do "
            "not know.",
            f"Set it to 0 in config.json, or {MODEL}.use_remove_padding=false.",
        )
    shared = options.sequence_parallel
    heads = int(config["num_attention_heads"])
    pairs = int(config.get("num_key_value_heads") or heads)
    if heads % shared or (pairs % shared and shared % pairs):
        raise UsageError(
            "DPA854",
            f"{ACTOR}.ulysses_sequence_parallel_size={shared} ranks cannot share {heads} heads "
            f"and {pairs} key/value heads.",
            "Use a size that divides the heads, and divides or is a multiple of the key/value "
            "heads.",
        )


def _known_to_transformers(config: Mapping[str, Any]) -> None:
    kind = config["model_type"]
    if kind in FAMILIES:  # without the import: their values were checked where they were read
        return
    import transformers
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    if kind not in CONFIG_MAPPING or CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UsageError(
            "DPA852",
            f"config.json of the model: model_type {kind!r} is no causal language model of "
            f"transformers {transformers.__version__}.",
            "Use another model, or a release of transformers that has it; code in the folder is "
            "not run.",
        )
    try:
        CONFIG_MAPPING[kind].from_dict(dict(config))
    except unfit() as error:
        raise UsageError(
            "DPA852",
            f"config.json of the model: transformers {transformers.__version__} does not take it "
            f"({reason(error)}).",
            REMEDY,
        ) from error
