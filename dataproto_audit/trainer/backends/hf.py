"""Models from a local Hugging Face folder, and per-token outputs from their logits."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends.base import MicroBatch, ModelSpec, TokenOutputs
from dataproto_audit.trainer.backends.fused import plain_scores

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_model(spec: ModelSpec) -> nn.Module:
    """The model of ``spec`` on the CPU, whole, in evaluation mode: a causal language model, or a
    token classifier with one label for values, whose dropout is off.

    Raises DPA852 if the folder lacks its config or weights, DPA851 for an unknown dtype.
    """
    folder = Path(spec.path)
    model_config(spec)
    if spec.dtype not in DTYPES:
        raise UsageError(
            "DPA851", f"unknown model dtype {spec.dtype!r}.", f"Choose one of {', '.join(DTYPES)}."
        )
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    kind = AutoModelForTokenClassification if spec.values else AutoModelForCausalLM
    try:
        options: dict[str, Any] = {}
        if spec.values:
            config = options["config"] = AutoConfig.from_pretrained(str(folder), **local)
            config.num_labels, config.classifier_dropout = 1, 0.0
        with _quiet(spec.values):
            model, told = kind.from_pretrained(
                str(folder),
                dtype=DTYPES[spec.dtype],
                attn_implementation=spec.attn_implementation,
                output_loading_info=True,
                **local,
                **options,
            )
    except OSError as error:
        raise UsageError(
            "DPA852", f"no weights in {folder}: {error}", "Save model and tokenizer there."
        ) from error
    if spec.values and "score.weight" in told["missing_keys"]:
        for parameter in model.score.parameters():
            nn.init.zeros_(parameter)
    built: nn.Module = model.eval()
    return built


@contextmanager
def _quiet(missing_head: bool) -> Iterator[None]:
    """Without transformers' report of a head that is not in the folder, if that is foreseen."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    if missing_head:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def model_config(spec: ModelSpec) -> dict[str, Any]:
    """The folder's ``config.json``; raises DPA852 if there is none that can be read."""
    file = Path(spec.path) / "config.json"
    if not file.is_file():
        raise UsageError(
            "DPA852", f"{file.parent} has no config.json.", "Name a folder in Hugging Face layout."
        )
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError("DPA852", f"{file}: {error}.", "Save the model there again.") from error
    return config


def takes_logits_to_keep(model: nn.Module) -> bool:
    """Whether the model can skip the output layer at positions nobody asks for."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def response_logits(model: nn.Module, micro: MicroBatch, *, keep: bool) -> Tensor:
    """Logits [rows, response, vocabulary] that score ``micro.responses_BR``.

    The logits at position s predict token s + 1: the model sees all tokens but the last, which
    predicts nothing, and the last R positions of what it saw are kept.
    """
    options: dict[str, Any] = {"logits_to_keep": micro.response_width} if keep else {}
    logits: Tensor = model(
        input_ids=micro.input_ids_BT[:, :-1],
        attention_mask=micro.attention_mask_BT[:, :-1],
        position_ids=micro.position_ids_BT[:, :-1],
        use_cache=False,
        **options,
    ).logits
    return logits[:, -micro.response_width :]


def token_outputs(
    logits: Tensor, micro: MicroBatch, *, temperature: float, entropy: bool
) -> TokenOutputs:
    """Log-probs and, if asked for, entropies of the responses, in float32.

    Both are 0 where the response is not attended, and nothing flows back from there.
    """
    attended_BR = micro.response_attention_BR
    chosen_BR, entropy_BR = plain_scores(
        logits, micro.responses_BR, temperature=temperature, entropy=entropy
    )
    log_probs_BR = torch.where(attended_BR, chosen_BR, 0.0)
    if entropy_BR is None:
        return TokenOutputs(log_probs_BR)
    return TokenOutputs(log_probs_BR, torch.where(attended_BR, entropy_BR, 0.0))
