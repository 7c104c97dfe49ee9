"""Model folders: check a local Hugging Face folder, or write a tiny Qwen3 on the spot.

A model folder holds ``config.json``, safetensors (or ``pytorch_model.bin``) and a tokenizer.
The tiny one is written with numpy, ``safetensors`` and ``tokenizers`` only, so that making it
costs milliseconds and imports neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.model_config import read_config
from dataproto_audit.trainer.tokenizer import Tokenizer, load_tokenizer, write_char_tokenizer
from dataproto_audit.trainer.weight_files import LOOKED_FOR, SUFFIXES, check_weights

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
SAVE_REMEDY = "Save model and tokenizer there with save_pretrained, or leave model.path empty."


@dataclass(frozen=True)
class TinyModel:
    """Sizes of the tiny model (``actor_rollout_ref.model.tiny``); defaults are the quickstart's.

    ``charset`` is ``ascii`` (printable ASCII and newline), ``arithmetic`` (digits, ``+-*/=()``,
    space, lower case), ``digits`` (digits and ``+-=``) or the characters themselves; it fixes the
    vocabulary, so the model's ``vocab_size`` always equals the tokenizer's. Few characters are
    learned faster. ``head_dim`` 32 is the smallest that vLLM's CPU attention takes.
    """

    architecture: str = "qwen3"
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 192
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 1024
    initializer_range: float = 0.02
    charset: str = "ascii"
    seed: int = 1


@dataclass(frozen=True)
class ModelFolder:
    """A checked model folder with its tokenizer; ``config`` is what :func:`read_config` gave."""

    path: Path
    config: dict[str, Any]
    tokenizer: Tokenizer

    @property
    def vocab_size(self) -> int:
        """Rows of the output layer; may exceed the number of tokens the tokenizer knows."""
        return int(self.config["vocab_size"])


def prepare_model(model_config: Any, *, folder: Path) -> ModelFolder:
    """Open ``model_config.path``, or write the tiny model into ``folder`` when it is null.

    ``model_config`` is the ``actor_rollout_ref.model`` section. Raises UsageError DPA852 for an
    incomplete folder and DPA851 for impossible sizes.
    """
    path = _get(model_config, "path")
    if path:
        return open_model(Path(str(path)))
    write_tiny_model(folder, tiny_from_config(_get(model_config, "tiny")))
    return open_model(folder)


def open_model(path: Path) -> ModelFolder:
    """Check that ``path`` holds config, weights that fit it, and tokenizer; UsageError DPA852 if it
    does not."""
    if not path.is_dir():
        raise UsageError("DPA852", f"{path}: no such model folder.", SAVE_REMEDY)
    missing = [name for name, there in _parts(path) if not there]
    if missing:
        raise UsageError("DPA852", f"{path}: missing {', '.join(missing)}.", SAVE_REMEDY)
    config = read_config(path)
    check_weights(path, config)
    return ModelFolder(path, config, load_tokenizer(path, config))


def holds_weights(path: Path) -> bool:
    """Whether a model folder has any file of weights, or an index of some. Whether they are the
    model's is for :func:`.weight_files.check_weights`."""
    return any(
        file.is_file() and (file.suffix in SUFFIXES or file.name in LOOKED_FOR)
        for file in path.iterdir()
    )


def _parts(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield what a model folder needs and whether it is there."""
    yield "config.json", (path / "config.json").is_file()
    yield "weights (*.safetensors)", holds_weights(path)
    yield "a tokenizer (tokenizer.json)", any((path / name).is_file() for name in TOKENIZER_FILES)


def tiny_from_config(section: Any) -> TinyModel:
    """Read ``model.tiny``; UsageError DPA851 for unknown keys or sizes that cannot work."""
    given: dict[str, Any] = dict(section or {})
    known = {field.name for field in fields(TinyModel)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise UsageError("DPA851", f"model.tiny: unknown {unknown}.", f"Known: {sorted(known)}.")
    tiny = TinyModel(**{key: value for key, value in given.items() if value is not None})
    if tiny.architecture != "qwen3":
        raise UsageError(
            "DPA851",
            f"model.tiny.architecture={tiny.architecture!r} cannot be made on the spot.",
            "Use qwen3, or give the folder of another model in model.path.",
        )
    if tiny.num_attention_heads % tiny.num_key_value_heads:
        raise UsageError(
            "DPA851",
            f"model.tiny: {tiny.num_attention_heads} heads do not divide over "
            f"{tiny.num_key_value_heads} key/value heads.",
            "Make num_attention_heads a multiple of num_key_value_heads.",
        )
    return tiny


def write_tiny_model(folder: Path, tiny: TinyModel) -> Path:
    """Write config, weights and character tokenizer; the same seed gives the same bytes."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    ids = write_char_tokenizer(folder, tiny.charset, max_length=tiny.max_position_embeddings)
    config = _qwen3_config(tiny, vocab_size=ids["vocab_size"], special=ids)
    _write_json(folder / "config.json", config)
    special = {key: ids[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
    _write_json(folder / "generation_config.json", special)
    weights = dict(_qwen3_weights(tiny, ids["vocab_size"], np.random.default_rng(tiny.seed)))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _qwen3_config(
    tiny: TinyModel, *, vocab_size: int, special: Mapping[str, int]
) -> dict[str, Any]:
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    more = ("head_dim", "intermediate_size", "tie_word_embeddings", "max_position_embeddings")
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        **{key: getattr(tiny, key) for key in (*sizes, *more, "initializer_range")},
        **{key: special[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id")},
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        # transformers 4 reads the first, transformers 5 and vLLM the second.
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "use_sliding_window": False,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def _qwen3_weights(
    tiny: TinyModel, vocab_size: int, rng: np.random.Generator
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield weights under Hugging Face names: matrices N(0, initializer_range), norms 1."""

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        values = rng.standard_normal((rows, columns), dtype=np.float32)
        return np.multiply(values, np.float32(tiny.initializer_range))

    def ones(size: int) -> NDArray[np.float32]:
        return np.ones(size, dtype=np.float32)

    hidden, inner = tiny.hidden_size, tiny.intermediate_size
    query = tiny.num_attention_heads * tiny.head_dim
    key_value = tiny.num_key_value_heads * tiny.head_dim
    yield "model.embed_tokens.weight", matrix(vocab_size, hidden)
    for layer in range(tiny.num_hidden_layers):
        name = f"model.layers.{layer}."
        yield name + "input_layernorm.weight", ones(hidden)
        yield name + "self_attn.q_proj.weight", matrix(query, hidden)
        yield name + "self_attn.k_proj.weight", matrix(key_value, hidden)
        yield name + "self_attn.v_proj.weight", matrix(key_value, hidden)
        yield name + "self_attn.q_norm.weight", ones(tiny.head_dim)
        yield name + "self_attn.k_norm.weight", ones(tiny.head_dim)
        yield name + "self_attn.o_proj.weight", matrix(hidden, query)
        yield name + "post_attention_layernorm.weight", ones(hidden)
        yield name + "mlp.gate_proj.weight", matrix(inner, hidden)
        yield name + "mlp.up_proj.weight", matrix(inner, hidden)
        yield name + "mlp.down_proj.weight", matrix(hidden, inner)
    yield "model.norm.weight", ones(hidden)
    if not tiny.tie_word_embeddings:
        yield "lm_head.weight", matrix(vocab_size, hidden)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _get(section: Any, key: str) -> Any:
    """Read a key of a dict, DictConfig or dataclass; None if absent."""
    return section.get(key) if hasattr(section, "get") else getattr(section, key, None)
