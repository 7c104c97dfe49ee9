import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.models import (
    TinyModel,
    open_model,
    prepare_model,
    tiny_from_config,
    write_tiny_model,
)


@pytest.fixture
def folder(tmp_path):
    return write_tiny_model(tmp_path / "tiny", TinyModel())


def test_the_tiny_folder_is_complete_and_sizes_agree(folder):
    model = open_model(folder)
    assert model.vocab_size == len(model.tokenizer)
    weights = load_file(folder / "model.safetensors")
    assert weights["lm_head.weight"].shape == (model.vocab_size, 64)
    assert weights["model.layers.1.self_attn.k_proj.weight"].shape == (2 * 32, 64)
    assert abs(weights["model.embed_tokens.weight"].std() - 0.02) < 1e-3
    assert (weights["model.norm.weight"] == 1).all()


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    names = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")
    one, two, other = (
        write_tiny_model(tmp_path / name, TinyModel(seed=seed))
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes()
    assert (one / names[0]).read_bytes() != (other / names[0]).read_bytes()


def test_a_tied_model_has_no_output_layer(tmp_path):
    folder = write_tiny_model(tmp_path / "tied", TinyModel(tie_word_embeddings=True))
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")


def test_transformers_loads_every_weight(folder):
    import transformers

    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    loaded = {name: value.numpy() for name, value in model.state_dict().items()}
    assert saved.keys() == loaded.keys()
    assert all(np.array_equal(saved[name], loaded[name]) for name in saved)
    assert model.config.rope_parameters["rope_theta"] == 10000.0
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer("5+3=")["input_ids"] == open_model(folder).tokenizer.encode("5+3=")


def test_making_and_opening_it_imports_neither_torch_nor_transformers(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from dataproto_audit.trainer.models import prepare_model\n"
        f"prepare_model({{'path': None, 'tiny': {{}}}}, folder=Path({str(tmp_path)!r}))\n"
        "print(sorted({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_given_path_wins_over_the_tiny_model(folder, tmp_path):
    config = {"path": str(folder), "tiny": {"hidden_size": 128}}
    assert prepare_model(config, folder=tmp_path / "unused").path == folder
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize(
    ("gone", "named"),
    [
        ("config.json", "config.json"),
        ("model.safetensors", "weights"),
        ("tokenizer.json", "tokenizer"),
    ],
)
def test_what_is_missing_is_named(folder, gone, named):
    (folder / gone).unlink()
    with pytest.raises(UsageError, match="DPA852") as error:
        open_model(folder)
    assert named in error.value.message


def _rewrite(change):
    def work(folder):
        file = folder / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return work


@pytest.mark.parametrize(
    "change",
    [lambda data: b"", lambda data: b"garbage" * 9, lambda data: data[:-4], lambda data: data[:20]],
)
def test_weights_that_are_no_safetensors_file_are_refused(tmp_path, change):
    folder = write_tiny_model(tmp_path / "model", TinyModel())
    open_model(folder)
    _rewrite(change)(folder)
    with pytest.raises(UsageError, match=r"DPA852 .*model\.safetensors: no readable"):
        open_model(folder)


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(UsageError, match=r"DPA852.*no such model folder"):
        open_model(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_an_unusable_config_is_an_error(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(UsageError, match=r"DPA852.*config\.json"):
        open_model(folder)


def test_missing_shards_of_an_index_are_named(folder):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(UsageError, match=r"DPA852.*model-00002-of-00002") as error:
        open_model(folder)
    assert "00001-of" not in error.value.message
    index.write_text("{")
    with pytest.raises(UsageError, match=r"DPA852.*index"):
        open_model(folder)


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"hidden": 3}, "unknown"),
        ({"architecture": "gpt9"}, "gpt9"),
        ({"num_attention_heads": 3}, "3 heads"),
    ],
)
def test_impossible_tiny_models_are_refused(section, named):
    with pytest.raises(UsageError, match="DPA851") as error:
        tiny_from_config(section)
    assert named in error.value.message


def test_null_keys_of_the_configuration_keep_their_defaults():
    assert tiny_from_config({"hidden_size": None, "seed": 5}) == TinyModel(seed=5)
    assert tiny_from_config(None) == TinyModel()
