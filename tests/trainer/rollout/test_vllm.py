"""What of the vLLM engine can be checked without vLLM."""

from types import SimpleNamespace

import pytest
import torch

from dataproto_audit.trainer.rollout import vllm_weights
from dataproto_audit.trainer.rollout.base import EngineConfig
from dataproto_audit.trainer.rollout.vllm import (
    _drop_meeting_file,
    _engine_arguments,
    _refused,
    _used,
)

CONFIG = EngineConfig("folder", stop_ids=(2,), pad_id=0, max_model_len=64)


@pytest.mark.parametrize("columns", [1, 8, 256, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_matrix_is_recovered_exactly(columns, dtype):
    weight = torch.randn(7, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    module = SimpleNamespace(
        cpu_linear=lambda x, weight_, bias: torch.nn.functional.linear(x, weight), weight=None
    )
    assert vllm_weights._unpack(module, dtype, columns).equal(weight)


def test_a_matrix_that_would_cost_too_much_is_left_out(monkeypatch):
    monkeypatch.setattr(vllm_weights, "READ_BACK_LIMIT", 1e5)
    module = SimpleNamespace(cpu_linear=lambda x, *_: torch.zeros(len(x), 9), weight=None)
    assert vllm_weights._unpack(module, torch.float32, 300) is None


def test_fused_layers_are_cut_into_their_names():
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    tensor = torch.arange(8.0)[:, None]
    module = SimpleNamespace(output_sizes=[4, 2, 2])
    parts = dict(vllm_weights._unfuse("layers.0.qkv_proj", module, tensor, fused))
    assert {name: part[:, 0].tolist() for name, part in parts.items()} == {
        "layers.0.q_proj": [0, 1, 2, 3],
        "layers.0.k_proj": [4, 5],
        "layers.0.v_proj": [6, 7],
    }
    assert dict(vllm_weights._unfuse("norm", module, tensor, fused)) == {"norm": tensor}
    odd = SimpleNamespace(output_sizes=[4, 2])
    assert vllm_weights._unfuse("layers.0.qkv_proj", odd, tensor, fused) is None


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("max_model_len (128) is greater"), "DPA851"),
        (RuntimeError("Unsupported CPU attention configuration: head_dim=16"), "DPA851"),
        (RuntimeError("out of memory"), "DPA865"),
    ],
)
def test_a_refusal_is_the_user_s_or_the_engine_s(error, code):
    told = _refused(error)
    assert told.code == code
    assert str(error) in told.message
    assert len(_refused(ValueError("x" * 9999)).message) < 600


def test_memory_is_given_as_the_device_wants_it():
    cpu, gpu = (_engine_arguments(CONFIG, on_gpu=on) for on in (False, True))
    assert cpu["kv_cache_memory_bytes"] == 64 * 2**20
    assert cpu["block_size"] == 32
    assert gpu["gpu_memory_utilization"] == 0.5
    assert not {"kv_cache_memory_bytes", "block_size"} & set(gpu)
    assert cpu["logprobs_mode"] == gpu["logprobs_mode"] == "processed_logprobs"


def test_what_was_used_is_read_from_the_request():
    settings = SimpleNamespace(
        n=2, temperature=0.7, top_p=0.9, top_k=-1, max_tokens=3, min_tokens=0, ignore_eos=False,
        stop_token_ids=[2],
    )  # fmt: skip
    used = _used(settings, 11)
    assert used["temperature"] == 0.7
    assert (used["seed"], used["stop_token_ids"]) == (11, [2])


def test_the_file_through_which_the_engine_met_itself_is_removed(tmp_path, monkeypatch):
    path = tmp_path / "vllm_dist_1"
    store = torch.distributed.FileStore(str(path), 1)
    store.set("a", "b")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    c10d = torch.distributed.distributed_c10d
    monkeypatch.setattr(
        c10d, "_get_default_store", lambda: torch.distributed.PrefixStore("p", store)
    )
    assert path.exists()
    _drop_meeting_file()
    assert not path.exists()
    _drop_meeting_file()


def test_no_file_is_looked_for_where_nothing_was_set_up():
    _drop_meeting_file()
