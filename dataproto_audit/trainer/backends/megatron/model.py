"""``GPTModel`` from a Hugging Face ``config.json``: Qwen2, Qwen3 and Llama."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dataproto_audit.trainer.backends.layers import EMBEDDING, NORM, layer_name
from dataproto_audit.trainer.backends.megatron import shims
from dataproto_audit.trainer.backends.megatron.options import MegatronOptions
from dataproto_audit.trainer.backends.megatron.sizes import head_dim, tied

with shims.importing():
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

    from dataproto_audit.trainer.backends.megatron.modules import CoreAttention, RMSNorm, ValueHead

_GROUPS: list[MegatronOptions] = []
"""The layout that this process's groups were made for, if any."""


def join_groups(options: MegatronOptions, *, timeout_s: float, seed: int) -> None:
    """Make megatron's process groups. Collective over the world.

    They are global to a process: another layout replaces them, and models built before are then
    of no use.
    """
    shims.install()
    if [_sizes(options)] != [_sizes(made) for made in _GROUPS] or not _initialized():
        if _initialized():
            parallel_state.destroy_model_parallel()
        with shims.quiet():
            parallel_state.initialize_model_parallel(
                options.tp,
                options.pp,
                virtual_pipeline_model_parallel_size=options.vpp,
                context_parallel_size=options.cp,
                create_gloo_process_groups=False,
                distributed_timeout_minutes=timeout_s / 60,
            )
        _GROUPS[:] = [options]
    shims.seed(seed)


def leave_groups() -> None:
    """Forget megatron's process groups; before those of torch are destroyed. *Local.*"""
    if _initialized():
        parallel_state.destroy_model_parallel()
    _GROUPS.clear()


def _sizes(options: MegatronOptions) -> tuple[Any, ...]:
    return (options.tp, options.pp, options.vpp, options.cp)


def _initialized() -> bool:
    return bool(parallel_state.model_parallel_is_initialized())


def padded_vocabulary(model: Mapping[str, Any], tp: int) -> int:
    """Rows of the embedding over all ranks: the vocabulary, raised to a multiple of ``tp``."""
    return -(-int(model["vocab_size"]) // tp) * tp


def transformer_config(
    model: Mapping[str, Any], options: MegatronOptions, dtype: torch.dtype
) -> TransformerConfig:
    """Megatron's configuration of the model in a layout.

    Flags that are silently wrong otherwise: ``perform_initialization`` marks tensor-parallel
    weights, without which their norm is wrong; the interleaved schedule takes
    ``overlap_p2p_comm`` with ``batch_p2p_comm=False`` and ``deallocate_pipeline_outputs=False``
    (schedules.py sends and receives one another's tensors, or frees what is still being sent).
    """
    gpu = torch.cuda.is_available()
    interleaved = options.vpp is not None
    full = options.recompute == "full"
    kind = model["model_type"]
    heads = int(model["num_attention_heads"])
    with shims.quiet():
        return TransformerConfig(
            num_layers=int(model["num_hidden_layers"]),
            hidden_size=int(model["hidden_size"]),
            num_attention_heads=heads,
            num_query_groups=int(model.get("num_key_value_heads") or heads),
            kv_channels=head_dim(model),
            ffn_hidden_size=int(model["intermediate_size"]),
            normalization="RMSNorm",
            layernorm_epsilon=float(model.get("rms_norm_eps", 1e-6)),
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            add_qkv_bias=kind == "qwen2",
            qk_layernorm=kind == "qwen3",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=options.tp,
            pipeline_model_parallel_size=options.pp,
            virtual_pipeline_model_parallel_size=options.vpp,
            context_parallel_size=options.cp,
            sequence_parallel=options.sp,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            variable_seq_lengths=True,
            moe_token_dispatcher_type="alltoall",  # asked for with variable lengths
            use_cpu_initialization=not gpu,
            perform_initialization=True,
            persist_layer_norm=False,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            apply_rope_fusion=False,
            cuda_graph_scope=[],
            batch_p2p_comm=gpu and not interleaved,
            overlap_p2p_comm=interleaved,
            deallocate_pipeline_outputs=not interleaved,
            recompute_granularity=options.recompute,
            recompute_method="uniform" if full else None,
            recompute_num_layers=1 if full else None,
        )


class HiddenModel(GPTModel):  # type: ignore[misc]  # megatron-core has no types
    """A ``GPTModel`` whose last stage gives hidden states; :mod:`.outputs` applies its head where
    a token is scored, so that no logits of prompts and padding are computed."""

    def _postprocess(self, hidden_states: Any, *_: Any, **__: Any) -> Any:
        return hidden_states

    def head_weight(self) -> Any:
        """This rank's rows of the output layer, in the last stage."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def build_chunks(
    model: Mapping[str, Any],
    config: TransformerConfig,
    options: MegatronOptions,
    *,
    values: bool = False,
) -> list[HiddenModel]:
    """This rank's chunks of layers in the order of the schedule, with weights yet to be loaded.

    ``values`` puts a value head in the place of the output layer.
    """
    with shims.region():
        chunks = [
            _chunk(model, config, stage if options.vpp else None)
            for stage in range(options.vpp or 1)
        ]
    for chunk in chunks:
        if values and chunk.post_process:
            del chunk.output_layer
            chunk.value_head = ValueHead(config)
    return chunks


def layers_of(chunk: HiddenModel, *, first_layer: int) -> dict[str, nn.Module]:
    """What a chunk holds of the layers in :mod:`..layers`; ``first_layer`` is its layer 0's place
    in the model."""
    found: dict[str, nn.Module] = {}
    if chunk.pre_process:
        found[EMBEDDING] = chunk.embedding
    for number, layer in enumerate(chunk.decoder.layers, first_layer):
        found[layer_name(number, "self_attn")] = layer.self_attention
        found[layer_name(number, "mlp")] = layer.mlp
        found[layer_name(number)] = layer
    if chunk.post_process:
        found[NORM] = chunk.decoder.final_layernorm
    return found


def _chunk(model: Mapping[str, Any], config: TransformerConfig, stage: int | None) -> HiddenModel:
    where = {"ignore_virtual": False, "vp_stage": stage}
    chunk = HiddenModel(
        config,
        _layers(config, stage),
        vocab_size=padded_vocabulary(model, config.tensor_model_parallel_size),
        max_sequence_length=int(model.get("max_position_embeddings", 2048)),
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        parallel_output=True,
        share_embeddings_and_output_weights=tied(model),
        position_embedding_type="rope",
        rotary_base=_rope_theta(model),
        vp_stage=stage,
    )
    padding = model.get("pad_token_id")
    if chunk.pre_process and padding is not None and int(padding) >= 0:  # old Llamas say -1: none
        hook = partial(_still_padding, padding=int(padding))
        chunk.embedding.word_embeddings.register_forward_hook(hook)
    return chunk


def _still_padding(module: Any, inputs: Any, output: Any, *, padding: int) -> Any:
    """Keep the embedding of the padding token without gradient, as ``padding_idx`` does in
    transformers: it matters where the policy samples that token."""
    here = inputs[0] == padding
    if module.reduce_scatter_embeddings:  # this rank's part of the sequence, which comes first
        group = parallel_state.get_tensor_model_parallel_group()
        here = here.t().chunk(group.size())[group.rank()]
    # Contiguous, as pipeline stages send it: the mask's layout must not become the output's.
    return torch.where(here.contiguous()[..., None], output.detach(), output).contiguous()


def _rope_theta(model: Mapping[str, Any]) -> Any:
    rope = model.get("rope_parameters") or {}
    return rope.get("rope_theta", model.get("rope_theta", 10000.0))


def _layers(config: TransformerConfig, stage: int | None) -> TransformerBlockSubmodules:
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = CoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    count = get_num_layers_to_build(config, vp_stage=stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=RMSNorm)
