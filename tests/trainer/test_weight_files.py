"""Damaged and incomplete model folders are told before anything loads them."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends import hf
from dataproto_audit.trainer.backends.base import ModelSpec
from dataproto_audit.trainer.backends.fsdp_limits import check_model
from dataproto_audit.trainer.compare import run
from dataproto_audit.trainer.compare.layouts import parse_layouts
from dataproto_audit.trainer.config import load_config
from dataproto_audit.trainer.models import TinyModel, open_model, write_tiny_model
from dataproto_audit.trainer.preflight import prepare
from dataproto_audit.trainer.weight_files import check_weights

FILE, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def folder(tmp_path):
    return write_tiny_model(tmp_path / "tiny", TinyModel(charset="arithmetic"))


def configure(folder, **changes):
    file = folder / CONFIG
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps(config))


def without(folder, *names):
    weights = load_file(folder / FILE)
    save_file({n: w for n, w in weights.items() if n not in names}, folder / FILE)


def cut_short(folder):
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-100])


def index_of_nothing(folder):
    (folder / FILE).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {EMBEDDING: "model-00001.safetensors"}}))


def shards_without_index(folder):
    weights = load_file(folder / FILE)
    (folder / FILE).unlink()
    for part, names in enumerate((sorted(weights)[::2], sorted(weights)[1::2]), 1):
        held = {name: weights[name] for name in names}
        save_file(held, folder / f"model-{part:05d}-of-00002.safetensors")


def other_head(folder):
    """A tied model with an output layer of its own in the file."""
    configure(folder, tie_word_embeddings=True)


FAULTS = [
    (lambda f: without(f, "model.layers.1.mlp.up_proj.weight"), r"layers\.1\.mlp\.up_proj"),
    (lambda f: without(f, HEAD), "lm_head"),
    (lambda f: configure(f, num_hidden_layers=3), r"model\.layers\.2.* and 7 more"),
    (lambda f: configure(f, vocab_size=40), r"embed_tokens\.weight \(\d+, 64\) instead of \(40,"),
    (lambda f: configure(f, pad_token_id=999), "pad_token_id 999"),
    (lambda f: (f / CONFIG).write_text("[]"), "no object"),
    (lambda f: (f / FILE).write_bytes(b""), "readable safetensors"),
    (lambda f: (f / FILE).write_bytes(b"\x00\xffgarbage" * 9), "readable safetensors"),
    (cut_short, "readable safetensors"),
    (index_of_nothing, "missing: model-00001"),
    (lambda f: (f / FILE).rename(f / "weights.safetensors"), "looked for .* weights.safetensors"),
    (shards_without_index, "looked for .* model-00001-of-00002.safetensors, model-00002"),
    (lambda f: (f / FILE).rename(f / "pytorch_model-00001.bin"), "looked for .*model-00001.bin"),
    (lambda f: configure(f, num_hidden_layers="2"), "num_hidden_layers is '2'"),
    (lambda f: (f / CONFIG).write_text("[" * 100_000), "nested too deeply"),
    (other_head, "tie_word_embeddings"),
]


@pytest.mark.parametrize(("damage", "said"), FAULTS)
def test_train_and_compare_backends_refuse_a_damaged_folder(folder, tmp_path, damage, said):
    damage(folder)
    base = "actor_rollout_ref.model.path=" + str(folder)
    for name in ("quickstart", "megatron_quickstart"):
        config = load_config(name, [base, f"trainer.run_dir={tmp_path / 'run'}"])
        with pytest.raises(UsageError, match=f"DPA852.*{said}"):
            prepare(config, tmp_path / "scratch")
    for layout in parse_layouts("fsdp:1,megatron:tp=2", model=str(folder)):
        with pytest.raises(UsageError, match=f"DPA852.*{said}"):
            run.check(layout)


def test_a_type_that_transformers_does_not_know_is_refused_on_fsdp(folder):
    configure(folder, model_type="gpt9")
    (layout,) = parse_layouts("fsdp:1", model=str(folder))
    with pytest.raises(UsageError, match=r"DPA852.*'gpt9'"):
        run.check(layout)
    for kind in ("gemma2", "gpt2"):
        check_model(layout.model, layout.fsdp, {"model_type": kind})
    with pytest.raises(UsageError, match=r"DPA852.*'vit' is no causal"):
        check_model(layout.model, layout.fsdp, {"model_type": "vit"})


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_whole_folders_of_every_family_are_fine(family, kind, head):
    made = family(kind)
    check_weights(made, json.loads((made / CONFIG).read_text()), exact=True)
    hf.build_model(ModelSpec(str(made), head=head))


@pytest.mark.parametrize(
    "sizes",
    [
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        {"model_type": "qwen3", "attention_bias": True, "tie_word_embeddings": True},
        {"model_type": "qwen3"},
        {"model_type": "llama", "num_key_value_heads": None},
        {"model_type": "qwen2"},
    ],
)
def test_names_and_shapes_are_those_of_transformers(tmp_path, sizes):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{
        "vocab_size": 19, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, **sizes,
    })  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    check_weights(tmp_path, json.loads((tmp_path / CONFIG).read_text()), exact=True)
    names = sorted(load_file(tmp_path / FILE))
    for name in names:
        shutil.copy(tmp_path / FILE, tmp_path / "kept")
        without(tmp_path, name)
        with pytest.raises(UsageError, match=f"DPA852.*{name}"):
            check_weights(tmp_path, json.loads((tmp_path / CONFIG).read_text()))
        shutil.move(tmp_path / "kept", tmp_path / FILE)


def test_a_tied_model_may_store_its_matrix_twice(tmp_path):
    tiny = TinyModel(charset="arithmetic", tie_word_embeddings=True)
    folder = write_tiny_model(tmp_path / "tied", tiny)
    weights = load_file(folder / FILE)
    save_file({**weights, HEAD: weights[EMBEDDING].copy()}, folder / FILE)
    open_model(folder)
    weights[HEAD] = weights[EMBEDDING] + np.float32(1)
    save_file(weights, folder / FILE)
    with pytest.raises(UsageError, match=r"DPA852.*tie_word_embeddings"):
        open_model(folder)


def test_shards_of_an_index_are_read_and_other_files_are_not(folder):
    weights = load_file(folder / FILE)
    (folder / FILE).unlink()
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2],
             "model-00002-of-00002.safetensors": names[1::2]}  # fmt: skip
    for file, held in parts.items():
        save_file({name: weights[name] for name in held}, folder / file)
    listed = {name: file for file, held in parts.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"weight_map": listed}))
    (folder / "adapter.safetensors").write_bytes(b"not ours")
    assert open_model(folder).path == Path(folder)


def test_a_folder_without_the_prefix_is_for_transformers_only(tmp_path):
    tiny = TinyModel(charset="arithmetic", tie_word_embeddings=True)
    folder = write_tiny_model(tmp_path / "bare", tiny)
    weights = load_file(folder / FILE)
    bare = {name.removeprefix("model."): weight for name, weight in weights.items()}
    save_file(bare, folder / FILE, metadata={"format": "pt"})
    fsdp, megatron = parse_layouts("fsdp:1,megatron:dp=1", model=str(folder))
    run.check(fsdp)
    loaded = hf.build_model(fsdp.model).get_input_embeddings().weight.detach().numpy()
    assert np.array_equal(loaded, weights[EMBEDDING])
    with pytest.raises(UsageError, match=f"DPA852.*{EMBEDDING}"):
        run.check(megatron)


def test_a_rank_refuses_what_a_header_cannot_tell(folder):
    """The second guard: files that are not safetensors, and types that are not known here."""
    import torch

    weights = {name: torch.from_numpy(w) for name, w in load_file(folder / FILE).items()}
    (folder / FILE).unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    hf.build_model(ModelSpec(str(folder)))
    del weights["model.layers.0.mlp.up_proj.weight"]
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"DPA852.*layers\.0\.mlp\.up_proj"):
        hf.build_model(ModelSpec(str(folder)))


def test_a_pad_token_of_minus_one_is_none(folder):
    import torch

    from dataproto_audit.reference.logprobs import load_model
    from dataproto_audit.reference.values import load_value_model

    spec, last = ModelSpec(str(folder)), open_model(folder).vocab_size - 1
    for padding, still in ((last, True), (-1, False), (None, False)):
        configure(folder, pad_token_id=padding)
        open_model(folder)
        for model in (hf.build_model(spec), load_model(folder), load_value_model(folder)):
            embedding = model.get_input_embeddings()
            embedding(torch.tensor([last])).sum().backward()
            assert bool((embedding.weight.grad[last] == 0).all()) is still
