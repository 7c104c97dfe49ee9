"""Models from a local Hugging Face folder, and per-token outputs from their logits."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends.base import (
    VALUE_HEAD,
    MicroBatch,
    ModelSpec,
    TokenOutputs,
)
from dataproto_audit.trainer.backends.fused import plain_scores
from dataproto_audit.trainer.model_config import REMEDY, read_config

SHOWN = 4
LOADING: tuple[type[Exception], ...] = (
    OSError,
    EOFError,
    RuntimeError,
    SafetensorError,
    UnpicklingError,
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_model(spec: ModelSpec) -> nn.Module:
    """The model of ``spec`` on the CPU, whole, in evaluation mode: a causal language model, or a
    token classifier with one label for values, whose dropout is off.

    A ``pad_token_id`` of -1, which old Llamas have, is none: transformers alone would keep the last
    token's embedding still. Raises DPA852 if the folder lacks its config or some of its weights,
    or they do not fit together, DPA851 for an unknown dtype.
    """
    folder = Path(spec.path)
    padding = model_config(spec).get("pad_token_id")
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
    except LOADING + unfit() as error:
        raise UsageError(
            "DPA852",
            f"no weights in {folder} that transformers can load ({reason(error)}).",
            REMEDY,
        ) from error
    missing = set(told["missing_keys"])
    if spec.values and "score.weight" in missing:
        for parameter in model.score.parameters():
            nn.init.zeros_(parameter)
    if lost := sorted(missing - (set(VALUE_HEAD) if spec.values else set())):
        more = f" and {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""
        raise UsageError(
            "DPA852",
            f"{folder} holds no {', '.join(lost[:SHOWN])}{more}, which its config.json asks for: "
            "training would begin from random numbers there.",
            REMEDY,
        )
    if padding == -1:
        model.get_input_embeddings().padding_idx = None
    built: nn.Module = model.eval()
    return built


def unfit() -> tuple[type[Exception], ...]:
    """What transformers raises for a configuration that no model can be built from: its own checks
    of types and sizes, or whatever computing with a wrong one ends in."""
    from huggingface_hub.errors import StrictDataclassError

    computed = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
    return (StrictDataclassError, *computed)


def reason(error: Exception) -> str:
    """Type and words of an error in one line; torch's advice on unpickling is left out."""
    text = str(error).strip()
    if isinstance(error, UnpicklingError):
        text = "no file that torch.save wrote, or one that holds more than tensors"
    return f"{type(error).__name__}: {' '.join(text.split()).rstrip('.')}"


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
    """The folder's checked ``config.json``; raises DPA852."""
    return read_config(Path(spec.path))


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
