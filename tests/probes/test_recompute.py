"""Log-probs against a model that is at hand. The model is random and two layers deep."""

import numpy as np
import pytest
import torch

from dataproto_audit import check
from dataproto_audit.codes import UsageError
from dataproto_audit.probes.recompute import model_of, vocabulary_of
from dataproto_audit.reference.logprobs import token_log_probs
from dataproto_audit.testing.recipes import cook

FIELDS = ("rollout_log_probs", "old_log_probs", "ref_log_prob")


@pytest.fixture(scope="module")
def model():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=16, intermediate_size=96)  # fmt: skip
    return Qwen3ForCausalLM(Qwen3Config(**sizes, attn_implementation="eager")).eval()


def scored(model, batch, *, attention=None, temperature=1.0):
    t = {name: torch.from_numpy(np.asarray(value)) for name, value in batch["batch"].items()}
    mask = t["attention_mask"] if attention is None else attention
    log_probs, _ = token_log_probs(
        model, t["input_ids"], mask, t["position_ids"], 5, temperature=temperature
    )
    return log_probs.float().numpy()


@pytest.fixture
def batch(model):
    batch = cook("T", ())
    for name in FIELDS:
        batch["batch"][name] = scored(model, batch)
    return batch


def told(report):
    return {f.field: f for f in report.findings if f.code == "DPA308"}


def outcomes(report):
    return {o.check: (o.kind, o.reason) for o in report.outcomes if o.code == "DPA308"}


def test_what_the_model_says_is_right(model, batch):
    report = check(batch, model=model)
    assert told(report) == {}
    assert {kind for kind, _ in outcomes(report).values()} == {"passed"}


def test_a_pass_with_another_attention_mask_is_found(model, batch):
    """The mask of the loss in place of the attention mask: the prompt is not seen."""
    blind = torch.from_numpy(batch["batch"]["attention_mask"]).clone()
    blind[:, :3] = 0  # the last prompt token stays, so that every row has a first one
    for name in FIELDS[1:]:
        batch["batch"][name] = scored(model, batch, attention=blind)
    found = told(check(batch, model=model))
    assert set(found) == {"old_log_probs", "ref_log_prob"}
    old = found["old_log_probs"]
    assert (old.severity, old.stage, old.causes[0]) == ("fail", "old_log_prob",
                                                        "wrong_attention_mask")  # fmt: skip
    assert set(old.rows) == set(range(6))
    assert old.evidence["bound from"] == "bfloat16, measured"
    assert old.evidence["mean gap of rollout_log_probs"] < 1e-5


def test_one_cell_is_named(model, batch):
    batch["batch"]["old_log_probs"][2, 1] -= 0.5
    found = told(check(batch, model=model, config={"trainer_dtype": "float32"}))
    assert dict(found["old_log_probs"].columns) == {2: (1,)}
    assert "recomputed" in found["old_log_probs"].expected


def test_half_precision_of_the_trainer_is_no_finding(model, batch):
    import copy

    half = copy.deepcopy(model).to(torch.bfloat16)
    for name in FIELDS[1:]:
        batch["batch"][name] = scored(half, batch)
    assert told(check(batch, model=model)) == {}


def test_the_temperature_of_the_run_is_used(model, batch):
    batch["meta_info"]["temperature"] = 0.5
    for name in FIELDS:
        batch["batch"][name] = scored(model, batch, temperature=0.5)
    assert told(check(batch, model=model)) == {}
    assert set(told(check(batch, model=model, config={"temperature": 1.0}))) == set(FIELDS)


def test_the_reference_is_left_out_once_the_policy_has_moved(model, batch):
    batch["batch"]["ref_log_prob"] -= 0.1 * batch["batch"]["response_mask"]
    report = check(batch, model=model)
    kind, reason = outcomes(report)["ref_log_prob_recomputed"]
    assert (kind, "the policy has moved" in reason) == ("not_applicable", True)


def test_without_a_model_it_says_what_to_pass(batch):
    said = set(outcomes(check(batch)).values())
    assert said == {("not_checkable", "no model to recompute with: pass model=")}


def test_positions_on_several_axes_are_not_covered(model):
    batch = cook("V", ())
    kinds = outcomes(check(batch, model=model))
    assert kinds["old_log_probs_recomputed"] == ("not_applicable", "positions on several axes")


def test_a_folder_without_a_model_is_a_usage_error(batch, tmp_path):
    with pytest.raises(UsageError, match=r"DPA852 .*config.json is missing"):
        check(batch, model=tmp_path)


def test_a_folder_is_loaded_once(model, batch, tmp_path):
    model.save_pretrained(tmp_path)
    assert model_of(tmp_path) is model_of(str(tmp_path))
    assert told(check(batch, model=tmp_path)) == {}


def test_a_model_of_another_vocabulary_is_a_finding(model, batch):
    batch["batch"]["old_log_probs"][3, 2] = float("nan")
    batch["batch"]["input_ids"][1, 4] = 199
    report = check(batch, model=model)
    [found] = [f for f in report.findings if f.code == "DPA852"]
    assert (found.field, found.severity, found.stage) == ("input_ids", "fail", "rollout")
    assert found.actual == "ids up to 199, model has 64"
    assert "DPA301" in {f.code for f in report.findings}, "what else is wrong is told too"
    assert not [f for f in report.findings if f.code.startswith("DPA9")]
    reason = "input_ids holds ids that the given model has no embedding for"
    assert outcomes(report)["rollout_log_probs_recomputed"] == ("not_checkable", reason)


def test_ids_below_zero_and_positions_beyond_the_model_are_not_recomputed(model, batch):
    from transformers import GPT2Config, GPT2LMHeadModel

    batch["batch"]["input_ids"][1, 4] = -100
    assert {kind for kind, _ in outcomes(check(batch, model=model)).values()} == {"not_checkable"}
    short = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=3, n_embd=8, n_layer=1, n_head=1))
    told = outcomes(check(cook("T", ()), model=short.eval()))
    assert ("not_checkable", "position_ids go beyond the positions of the given model") in set(
        told.values()
    )


def test_a_module_that_has_no_table_of_embeddings_is_not_judged():
    assert vocabulary_of(torch.nn.Linear(2, 2)) is None


def test_without_old_log_probs_nobody_knows_whether_the_policy_has_moved(model, batch):
    del batch["batch"]["old_log_probs"]
    batch["batch"]["ref_log_prob"] -= 0.1 * batch["batch"]["response_mask"]
    report = check(batch, model=model)
    assert outcomes(report)["ref_log_prob_recomputed"][0] == "not_applicable"
    assert told(report) == {}


def test_how_many_tokens_are_off_and_by_how_much(model, batch):
    batch["batch"]["old_log_probs"][2, 0:2] -= 0.5
    batch["batch"]["old_log_probs"][4, 0] = float("nan")
    found = told(check(batch, model=model, config={"trainer_dtype": "float32"}))["old_log_probs"]
    assert dict(found.columns) == {2: (0, 1)}
    assert "; 2 tokens beyond 0.001 nats" in found.actual
    trained = int((batch["batch"]["response_mask"] != 0).sum())
    assert found.evidence["mean gap"] == pytest.approx(1.0 / trained, rel=0.01)
    assert found.expected.endswith("at row 2, column 0 (recomputed)")
