"""``config.json`` is read in one place: wrong values are DPA852 there, for every engine."""

import json

import pytest

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.model_config import FAMILIES, OF_FAMILIES, load_json, read_config
from dataproto_audit.trainer.tokenizer import load_tokenizer, write_char_tokenizer

SIZES = {
    "vocab_size": 19, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
VALUES = ("x", "2", None, 0, -2, True, 2.0, [2], {})


def written(folder, **changes):
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"head_dim": "x"}, "head_dim is 'x'; it must be a whole number"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"head_dim": 8.0}, "head_dim is 8.0"),
        ({"model_type": "qwen3", "head_dim": None}, "head_dim is null"),
        ({"num_key_value_heads": "x"}, "num_key_value_heads is 'x'"),
        ({"num_key_value_heads": True}, "num_key_value_heads is True"),
        ({"num_key_value_heads": 3}, "4 heads .* do not divide over 3"),
        ({"num_attention_heads": None}, "no num_attention_heads in it"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"intermediate_size": 2**40}, "intermediate_size is"),
        ({"hidden_size": 30, "head_dim": 8}, "hidden_size 30 does not divide over 4"),
        ({"rope_parameters": "x"}, "rope_parameters is 'x'; it must be an object or null"),
        ({"rope_scaling": [1]}, "rope_scaling is"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_parameters.rope_theta is 'x'"),
        ({"rope_scaling": {"type": 5}}, "rope_scaling.type is 5"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers is 2"),
        ({"layer_types": [["x"], 3]}, "layer_types is"),
        ({"attention_dropout": "x"}, "attention_dropout is 'x'"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
        ({"model_type": ["llama"]}, r"model_type is \['llama'\]; it must be a string"),
        ({"model_type": None}, "no model_type"),
        ({"model_type": "gpt2", "vocab_size": "19"}, "vocab_size is '19'"),
        ({"model_type": "gpt2", "eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"pad_token_id": [1]}, r"pad_token_id \[1\] is no token"),
        ({"pad_token_id": 19}, "pad_token_id 19 is no token of a vocabulary of 19"),
    ],
)
def test_a_wrong_value_is_named_with_what_its_key_takes(tmp_path, changes, said):
    with pytest.raises(UsageError, match=rf"DPA852 .*config\.json: .*{said}") as caught:
        read_config(written(tmp_path, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, '{"a":' * 100_000, "\x00", "[1]"])
def test_a_file_that_is_no_json_object_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=r"DPA852 .*config\.json.* (not readable|no object)"):
        read_config(tmp_path)
    with pytest.raises(UsageError, match=r"DPA852 .*nowhere.config\.json.*No such file"):
        read_config(tmp_path / "nowhere")


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": None},
        {"rope_theta": 500000, "rope_scaling": None, "torch_dtype": "bfloat16"},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"pad_token_id": -1, "eos_token_id": [1, 2], "bos_token_id": None},
        {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
        {"sliding_window": None, "attention_dropout": 0.0, "rms_norm_eps": 1e-06},
        {"layer_types": ["full_attention"] * 2, "a_key_of_its_own": {"x": [1]}},
    ],
)
def test_what_savers_write_is_taken_as_it_is(tmp_path, kind, changes):
    config = read_config(written(tmp_path, model_type=kind, **changes))
    assert config == {**SIZES, "model_type": kind, **changes}


def test_other_types_may_name_their_sizes_otherwise(tmp_path):
    sizes = {"num_attention_heads": [4, 8], "num_hidden_layers": None, "rope_parameters": "x"}
    assert read_config(written(tmp_path, model_type="other", **sizes))["model_type"] == "other"


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_transformers_refuses_is_refused_here(tmp_path, kind):
    """Else a rank would be the first to say so."""
    from transformers import CONFIG_MAPPING

    from dataproto_audit.trainer.backends.hf import unfit

    for key in (*SIZES, *OF_FAMILIES):
        for value in VALUES:
            config = {"model_type": kind, **SIZES, key: value}
            try:
                CONFIG_MAPPING[kind].from_dict(dict(config))
            except unfit():
                with pytest.raises(UsageError, match="DPA852"):
                    read_config(written(tmp_path, **config))


def test_generation_s_end_tokens_are_checked_too(tmp_path):
    write_char_tokenizer(tmp_path, "digits", max_length=8)
    file = tmp_path / "generation_config.json"
    for good, more in (([1, 2], {1, 2}), (1, {1}), (None, set()), ([], set())):
        file.write_text(json.dumps({"eos_token_id": good}))
        assert set(load_tokenizer(tmp_path).stop_ids) >= more
    for bad in ("x", ["x"], True):
        file.write_text(json.dumps({"eos_token_id": bad}))
        with pytest.raises(UsageError, match=r"DPA852 .*generation_config\.json: eos_token_id"):
            load_tokenizer(tmp_path)
    file.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        load_json(file)
    with pytest.raises(UsageError, match=r"DPA852 .*generation_config\.json: not readable"):
        load_tokenizer(tmp_path)
