"""Whether a layout can hold a model: every limit is an error before any worker starts.

Imports no megatron-core. Keys in messages are those of the configuration.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends.megatron.options import RECOMPUTE, MegatronOptions

SECTION = "actor_rollout_ref.actor"
KEY = f"{SECTION}.megatron"
DTYPE = "actor_rollout_ref.model.dtype"
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
VPP, CP = "virtual_pipeline_model_parallel_size", "context_parallel_size"
ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
}
INSTALL = (
    'Install it: pip install "dataproto-audit[megatron]", or set '
    "actor_rollout_ref.actor.strategy=fsdp2."
)
USE_FSDP = "Set the strategy to fsdp2, or use another model."


class _Wrong(NamedTuple):
    key: str
    text: str
    remedy: str


def check_layout(
    options: MegatronOptions,
    model: Mapping[str, Any],
    *,
    world_size: int,
    dtype: str = "float32",
    key: str = KEY,
) -> None:
    """Raise the first thing that keeps ``options`` from working on ``world_size`` ranks.

    ``model`` is what :func:`...model_config.read_config` gave; ``key`` the section that the options
    come from. Raises DPA858 (megatron-core missing), DPA854 (sizes do not divide), DPA851 (the
    rest).
    """
    if not installed():
        raise UsageError("DPA858", "megatron-core is not installed.", INSTALL)
    check_ranks(options, world_size=world_size, key=key)
    if dtype == "float16":
        raise UsageError(
            "DPA851",
            f"{DTYPE} is float16, and {key.removesuffix('.megatron')} runs on Megatron: float16 "
            "needs loss scaling, which this trainer has not.",
            f"Set {DTYPE} to float32 or bfloat16.",
        )
    for wrong in _values(options):
        raise UsageError("DPA851", f"{key}.{wrong.key}: {wrong.text}", wrong.remedy)
    for wrong in _model(model):
        raise UsageError("DPA851", f"Megatron: {wrong.key}: {wrong.text}", wrong.remedy)
    for wrong in _sizes(options, model):
        raise UsageError("DPA854", f"{key}.{wrong.key}: {wrong.text}", wrong.remedy)


def check_ranks(options: MegatronOptions, *, world_size: int, key: str = KEY) -> None:
    """Raise DPA854 if the ranks of one model do not divide those of the run."""
    ranks = options.model_ranks
    if ranks > 0 and world_size % ranks:
        raise UsageError(
            "DPA854",
            f"{_sizes_of_ranks(options, key)}: the {ranks} ranks of one model do not divide "
            f"{world_size} ranks.",
            f"Make trainer.n_gpus_per_node a multiple of {ranks}.",
        )


def _sizes_of_ranks(options: MegatronOptions, key: str) -> str:
    """The sizes that make up the ranks of a model, by name: those that are not one."""
    sizes = {TP: options.tp, PP: options.pp, CP: options.cp}
    return f"{key}." + " x ".join(f"{name}={size}" for name, size in sizes.items() if size != 1)


def installed() -> bool:
    """Whether megatron-core is there; nothing of it is run."""
    found = importlib.util.find_spec("megatron")
    if found is None or not found.submodule_search_locations:
        return False
    finder = importlib.machinery.PathFinder
    return finder.find_spec("megatron.core", list(found.submodule_search_locations)) is not None


def check_micro_batches(
    options: MegatronOptions, *, rows: int, size: int | None, section: str = SECTION
) -> None:
    """Raise DPA854 if an update of ``rows`` rows a rank and mini-batch cannot fill the pipeline.

    ``section`` holds the role's keys; ``size`` rows a micro-batch, None where they are cut by
    tokens: then the plan makes as many as the schedule asks for, and only the number of rows
    bounds it. The interleaved schedule
    takes multiples of its stages only (megatron-core 0.16.1, schedules.py:1015).
    """
    if options.pp == 1:
        return
    count = rows if size is None else -(-rows // size)
    what = "rows" if size is None else "micro-batches"
    where = f"{section}.ppo_micro_batch_size_per_gpu"
    if count < options.pp:
        raise UsageError(
            "DPA854",
            f"{section}.megatron.{PP}: {count} {what} of a mini-batch on each data-parallel rank "
            f"cannot fill {options.pp} pipeline stages.",
            f"Set {where} to {rows // options.pp} or less."
            if rows >= options.pp
            else f"Give each rank {options.pp} rows or more (ppo_mini_batch_size), or lower {PP}.",
        )
    if options.vpp and count % options.pp:
        raise UsageError(
            "DPA854",
            f"{section}.megatron.{VPP}: the interleaved schedule takes a multiple of {options.pp} "
            f"micro-batches, a mini-batch has {count} {what} on each data-parallel rank.",
            f"Choose {where} so that their number is a multiple of {options.pp}.",
        )


def _values(options: MegatronOptions) -> Iterator[_Wrong]:
    sizes = {TP: options.tp, PP: options.pp, CP: options.cp, VPP: options.vpp or 1}
    for name, size in sizes.items():
        if size < 1:
            yield _Wrong(name, f"{size} ranks.", "It must be positive.")
    if options.vpp is not None and options.pp == 1:
        text = "chunks of layers interleave over several pipeline stages, there is one."
        yield _Wrong(VPP, text, f"Set {PP} to 2 or more, or leave it empty.")
    if options.vpp == 1:
        yield _Wrong(VPP, "one chunk a stage is no interleaving.", "Set 2 or more, or null.")
    if options.sp and options.tp == 1:
        text = "there is no tensor-parallel peer to split the sequence with."
        yield _Wrong("sequence_parallel", text, f"Set it to false, or {TP} to 2 or more.")
    if options.recompute is not None and options.recompute not in RECOMPUTE:
        text = f"unknown {options.recompute!r}."
        yield _Wrong("recompute_granularity", text, f"Choose {', '.join(RECOMPUTE)} or null.")


def _model(model: Mapping[str, Any]) -> Iterator[_Wrong]:
    kind = model.get("model_type")
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        yield _Wrong("model_type", f"{kind!r} is not one of {known}.", USE_FSDP)
    rope = dict(model.get("rope_parameters") or model.get("rope_scaling") or {})
    kinds = rope.get("rope_type", rope.get("type", "default"))
    if kinds != "default":
        yield _Wrong("rope_parameters", f"rope of type {kinds!r} is not built.", USE_FSDP)
    if rope.get("partial_rotary_factor", model.get("partial_rotary_factor", 1.0)) != 1.0:
        yield _Wrong("partial_rotary_factor", "rope over a part of a head.", USE_FSDP)
    if model.get("use_sliding_window") or "sliding_attention" in (model.get("layer_types") or ()):
        yield _Wrong("use_sliding_window", "attention over a window is not built.", USE_FSDP)
    if kind != "qwen2" and model.get("attention_bias"):
        yield _Wrong("attention_bias", "a bias on the attention's output is not built.", USE_FSDP)
    if model.get("mlp_bias"):
        yield _Wrong("mlp_bias", "a bias in the MLP is not built.", USE_FSDP)
    if model.get("hidden_act", "silu") != "silu":
        yield _Wrong("hidden_act", f"{model['hidden_act']!r} is not silu.", USE_FSDP)
    if model.get("attention_dropout"):
        yield _Wrong("attention_dropout", "dropout is not built.", "Set it to 0 in config.json.")


def _sizes(options: MegatronOptions, model: Mapping[str, Any]) -> Iterator[_Wrong]:
    tp, pp = options.tp, options.pp
    heads = int(model["num_attention_heads"])
    groups = int(model.get("num_key_value_heads") or heads)
    for name, count in (
        ("attention heads", heads),
        ("key-value heads", groups),
        ("columns of the MLP", int(model["intermediate_size"])),
    ):
        if count % tp:
            text = f"{count} {name} of the model do not divide over {tp} ranks."
            yield _Wrong(TP, text, f"Choose a divisor of {count}.")
    layers = int(model["num_hidden_layers"])
    if layers % pp:
        text = f"{layers} layers of the model do not divide over {pp} stages."
        yield _Wrong(PP, text, f"Choose a divisor of {layers}.")
    if layers % (pp * (options.vpp or 1)):
        text = f"{layers} layers do not divide into {options.vpp} chunks on each of {pp} stages."
        yield _Wrong(VPP, text, f"Choose a divisor of {layers // pp}, or null.")
