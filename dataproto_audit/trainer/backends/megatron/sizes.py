"""Sizes and switches of a Hugging Face ``config.json``; imports no megatron-core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def head_dim(model: Mapping[str, Any]) -> int:
    """Columns of one attention head; Qwen3 has 128 where its config.json does not say."""
    given = model.get("head_dim", 128 if model.get("model_type") == "qwen3" else None)
    return int(given or int(model["hidden_size"]) // int(model["num_attention_heads"]))


def tied(model: Mapping[str, Any]) -> bool:
    """Whether the output layer shares the embedding's weight."""
    return bool(model.get("tie_word_embeddings", False))
