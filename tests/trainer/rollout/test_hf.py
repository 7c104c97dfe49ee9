import sys

import numpy as np
import pytest
import torch

from dataproto_audit.codes import RunError, UsageError
from dataproto_audit.trainer.rollout.base import EngineConfig, Sampling, SyncOptions, join
from dataproto_audit.trainer.rollout.hf import HfEngine, _processed
from dataproto_audit.trainer.rollout.rows import Widths, to_batch, to_requests

from .conftest import random_prompts, rows

WIDTHS = Widths(prompt=12, response=6, pad_id=0)
SAMPLING = Sampling(1.0, 1.0, -1, 6, 0)


def engine_of(model, **changes):
    config = EngineConfig(str(model.folder.path), stop_ids=(2,), pad_id=0, max_model_len=64)
    engine = HfEngine(type(config)(**{**vars(config), **changes}))
    info = engine.load()
    assert (info["engine"], info["device"]) == ("hf", "cpu")
    return engine


@pytest.fixture(scope="module")
def engine(untied):
    return engine_of(untied)


def generate(engine, batch, sampling=SAMPLING):
    requests = to_requests(batch, WIDTHS)
    made = engine.generate(requests.tokens_T, requests.length_K, requests.count_K, sampling)
    return to_batch(requests, made, WIDTHS)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_sampling_temperature(engine, untied, temperature):
    batch = rows(random_prompts(12), [4] * 12)
    out = generate(engine, batch, SAMPLING._replace(temperature=temperature))
    gap = out.batch["rollout_log_probs"] - untied.log_probs(out, temperature)
    assert gap.abs().max() < 1e-4
    assert out.meta_info["sampling"]["temperature"] == temperature


def test_seeds_decide(engine):
    batch = rows(random_prompts(6), [3] * 6)
    one, same, other = (generate(engine, batch, SAMPLING._replace(seed=s)) for s in (1, 1, 2))
    assert one.batch["responses"].equal(same.batch["responses"])
    assert not one.batch["responses"].equal(other.batch["responses"])


def test_greedy_takes_the_most_likely_token(engine, untied):
    out = generate(engine, rows(random_prompts(6), [1] * 6), SAMPLING._replace(temperature=0.0))
    tensors = out.batch
    with torch.no_grad():
        logits = untied.reference(
            input_ids=tensors["input_ids"],
            attention_mask=tensors["attention_mask"],
            position_ids=tensors["position_ids"],
        ).logits[:, -7:-1]
    on = tensors["response_mask"].bool()
    assert logits.argmax(-1)[on].equal(tensors["responses"][on])
    assert (tensors["rollout_log_probs"] - untied.log_probs(out)).abs().max() < 1e-4


def test_rows_end_at_the_stop_token_or_the_limit(engine):
    out = generate(engine, rows(random_prompts(40), [4] * 40))
    reasons, tensors = out.non_tensor_batch["finish_reason"], out.batch
    assert set(reasons) == {"stop", "length"}
    for row, reason in enumerate(reasons):
        length = int(tensors["response_mask"][row].sum())
        ids = tensors["responses"][row][:length].tolist()
        assert (ids[-1] == 2) == (reason == "stop")
        assert 2 not in ids[:-1]
        assert reason == "stop" or length == 6


def test_chunks_of_rows_sample_the_same_distribution(untied):
    small = engine_of(untied, max_num_seqs=5)
    out = generate(small, rows(random_prompts(4), [3] * 4))
    assert (out.batch["rollout_log_probs"] - untied.log_probs(out)).abs().max() < 1e-4


def test_filters_renormalise():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    top_k = _processed(logits, SAMPLING._replace(top_k=2)).exp()
    assert torch.allclose(top_k, torch.tensor([[0.625, 0.375, 0, 0]]))
    top_p = _processed(logits, SAMPLING._replace(top_p=0.7)).exp()
    assert torch.allclose(top_p, torch.tensor([[0.625, 0.375, 0, 0]]))
    assert _processed(logits, SAMPLING._replace(top_p=0.4)).exp()[0, 0] == 1
    plain = _processed(logits, SAMPLING._replace(temperature=0.0, top_p=0.1))
    assert torch.allclose(plain, logits)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_given_tokens_are_scored(engine, untied, temperature):
    out = generate(engine, rows(random_prompts(5), [2] * 5))
    mask = out.batch["attention_mask"].bool()
    ids = [row[on].tolist() for row, on in zip(out.batch["input_ids"], mask, strict=True)]
    tails = out.batch["response_mask"].sum(-1).numpy().astype(np.int32)
    scored = engine.score(*join(ids), tails, temperature)
    expected = untied.log_probs(out, temperature)[out.batch["response_mask"].bool()]
    assert np.abs(scored - expected.numpy()).max() < 1e-4


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_new_weights_arrive(request, name):
    model = request.getfixturevalue(name)
    engine = engine_of(model)
    model.change(1)
    payloads = model.exports(version=4)
    answer = engine.load_weights(SyncOptions(), *payloads)
    assert (answer.version, answer.prefix_cache_reset) == (4, True)
    assert (answer.stale, answer.unreadable) == ([], [])
    assert set(answer.checksum) == set(model.weights())
    out = generate(engine, rows(random_prompts(8), [2] * 8))
    assert (out.batch["rollout_log_probs"] - model.log_probs(out)).abs().max() < 1e-4
    plain = engine.load_weights(SyncOptions(checksum=False), *payloads)
    assert plain.checksum == {}


def test_missing_library_and_broken_folder(untied, tmp_path, monkeypatch):
    with pytest.raises(RunError, match=r"DPA865.*cannot load"):
        HfEngine(EngineConfig(str(tmp_path), (2,), 0, 64)).load()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"DPA858.*dataproto-audit\[trainer\]"):
        HfEngine(EngineConfig(str(untied.folder.path), (2,), 0, 64)).load()
