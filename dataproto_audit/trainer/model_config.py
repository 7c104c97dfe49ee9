"""A model folder's ``config.json``, read in one place into values that the rest relies on.

Every engine, the checks before a start and the ranks take it from :func:`read_config`, so a folder
is good or bad on all of them. Imports neither torch nor transformers. Of :data:`FAMILIES` every
key is checked that an engine computes with; of other types only those that all models share: what
else transformers asks of them is for :mod:`.backends.fsdp_limits`. Not covered: whether an
activation is known and whether a scaled rope has all of its parameters, which a rank tells.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dataproto_audit.codes import UsageError

CONFIG = "config.json"
FAMILIES = ("llama", "qwen2", "qwen3")
_DTYPE = re.compile(r"(b?float|u?int)\d+(_\w+)?|float|double|half")
ATTENTION = ("full_attention", "sliding_attention")
REMEDY = "Save the model there again with save_pretrained, config.json and weights together."
LARGEST = 2**31 - 1
"""Of a count: engines take 32 bits."""


class Kind(NamedTuple):
    """What a key takes, in words, and the test of it."""

    words: str
    holds: Callable[[Any], bool]

    def or_null(self) -> Kind:
        """The same, and null."""
        holds = self.holds
        return Kind(f"{self.words} or null", lambda value: value is None or holds(value))


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return _whole(value) or (isinstance(value, float) and math.isfinite(value))


def _tokens(value: Any) -> bool:
    return _whole(value) or (isinstance(value, list) and all(map(_whole, value)))


def _attention(value: Any) -> bool:
    return isinstance(value, list) and all(item in ATTENTION for item in value)


COUNT = Kind("a whole number from 1", lambda value: _whole(value) and 1 <= value <= LARGEST)
WHOLE = Kind("a whole number from 0", lambda value: _whole(value) and 0 <= value <= LARGEST)
POSITIVE = Kind("a positive number", lambda value: _number(value) and value > 0)
FROM_0 = Kind("a number from 0", lambda value: _number(value) and value >= 0)
FRACTION = Kind(
    "a floating-point number above 0",
    lambda value: isinstance(value, float) and _number(value) and value > 0,
)
SWITCH = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a string", lambda value: isinstance(value, str))
DTYPE = Kind(
    "a torch dtype's name",
    lambda value: isinstance(value, str) and _DTYPE.fullmatch(value) is not None,
)
OBJECT = Kind("an object", lambda value: isinstance(value, Mapping))
TOKEN = Kind("a token's number", _whole)
TOKENS = Kind("a token's number, a list of such", _tokens).or_null()

OF_ALL = {"model_type": TEXT, "vocab_size": COUNT, "eos_token_id": TOKENS}
OF_FAMILIES = {
    **dict.fromkeys(
        ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "head_dim", "max_position_embeddings"), COUNT,
    ),
    "num_key_value_heads": COUNT.or_null(),
    "rms_norm_eps": FRACTION,
    "initializer_range": Kind(
        "a floating-point number from 0 to 1",
        lambda value: isinstance(value, float) and 0 <= value <= 1,
    ),
    **dict.fromkeys(("rope_theta", "partial_rotary_factor"), POSITIVE),
    "attention_dropout": FROM_0,
    "hidden_act": TEXT,
    **dict.fromkeys(
        ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window", "use_cache"),
        SWITCH,
    ),
    "sliding_window": WHOLE.or_null(),
    "max_window_layers": WHOLE,
    "layer_types": Kind(f"a list of {' and '.join(ATTENTION)}", _attention).or_null(),
    "bos_token_id": TOKEN.or_null(),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "quantization_config"), OBJECT.or_null()),
    **dict.fromkeys(("dtype", "torch_dtype"), DTYPE.or_null()),
}  # fmt: skip
OF_ROPE = {
    **dict.fromkeys(("rope_theta", "partial_rotary_factor", "factor"), POSITIVE),
    **dict.fromkeys(("rope_type", "type"), TEXT),
}
NEEDED = ("model_type", "vocab_size")
NEEDED_OF_FAMILIES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
)  # fmt: skip
"""Sizes that must be given: transformers' defaults are not guessed."""


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed and checked ``config.json`` of ``folder``; UsageError DPA852 for one that is not
    there, is no JSON object, or has a value that no engine can take."""
    file = folder / CONFIG
    try:
        config = load_json(file)
    except ValueError as error:
        raise UsageError("DPA852", f"{file}: not readable ({error}).", REMEDY) from None
    if not isinstance(config, dict):
        raise UsageError("DPA852", f"{file} holds no object.", REMEDY)
    for wrong in _wrong(config):
        raise UsageError("DPA852", f"{file}: {wrong}.", REMEDY)
    return config


def load_json(file: Path) -> Any:
    """What a JSON file of a model folder holds; ValueError with the reason if it cannot be read or
    is nested too deeply."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(error.strerror or type(error).__name__) from error
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _wrong(config: Mapping[str, Any]) -> Iterator[str]:
    """What keeps a model of this configuration from being built, in words; each check relies on
    those before it having found nothing."""
    yield from _needed(config, NEEDED)
    yield from _of_kind(config, OF_ALL)
    padding, vocabulary = config.get("pad_token_id"), config["vocab_size"]
    if padding is not None and not (_whole(padding) and -1 <= padding < vocabulary):
        yield (
            f"pad_token_id {_shown(padding)} is no token of a vocabulary of {vocabulary}; it must "
            "be one, or null"
        )
    if config["model_type"] in FAMILIES:
        yield from _needed(config, NEEDED_OF_FAMILIES)
        yield from _of_kind(config, _rules(config["model_type"]))
        for key in ("rope_parameters", "rope_scaling"):
            yield from _of_kind(config.get(key) or {}, OF_ROPE, section=f"{key}.")
        yield from _fitting(config)


def _needed(config: Mapping[str, Any], keys: tuple[str, ...]) -> Iterator[str]:
    yield from (f"no {key} in it" for key in keys if config.get(key) is None)


def _of_kind(
    config: Mapping[str, Any], rules: Mapping[str, Kind], section: str = ""
) -> Iterator[str]:
    for key, kind in rules.items():
        if key in config and not kind.holds(config[key]):
            yield f"{section}{key} is {_shown(config[key])}; it must be {kind.words}"


def _rules(family: str) -> dict[str, Kind]:
    """Only a Llama takes null for the size of its heads."""
    return OF_FAMILIES | ({"head_dim": COUNT.or_null()} if family == "llama" else {})


def _fitting(config: Mapping[str, Any]) -> Iterator[str]:
    """Sizes of a known family that do not fit one another."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    pairs = config.get("num_key_value_heads") or heads
    if heads % pairs:
        yield f"{heads} heads (num_attention_heads) do not divide over {pairs} num_key_value_heads"
    if config["model_type"] == "llama" and hidden % heads:
        yield f"hidden_size {hidden} does not divide over {heads} num_attention_heads"
    kinds, layers = config.get("layer_types"), config["num_hidden_layers"]
    if kinds is not None and len(kinds) != layers:
        yield f"layer_types names {len(kinds)} layers, num_hidden_layers is {layers}"


def _shown(value: Any) -> str:
    return "null" if value is None else reprlib.repr(value)
