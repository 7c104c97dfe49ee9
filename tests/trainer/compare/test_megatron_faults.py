"""Seeded faults of Megatron layouts: the comparison finds each one and names where it begins.

Healthy layouts of the same kind stay quiet in the same module. Megatron keeps its groups in the
process, so every layout starts two new ones.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from dataproto_audit.commands.compare_backends import Reference
from dataproto_audit.trainer.compare import batches
from dataproto_audit.trainer.compare.layouts import parse_layouts
from dataproto_audit.trainer.compare.pool import Pool
from dataproto_audit.trainer.compare.run import compare

pytestmark = pytest.mark.engine

FOLDER = Path(__file__).parent
LAYER_2 = "model.layers.2.self_attn"
FIRST_ATTENTION = "model.layers.0.self_attn"


@pytest.fixture(scope="module")
def model(family):
    return family("qwen3")


@pytest.fixture(scope="module")
def reference(model):
    return Once(Reference(model, layers=True, values=True))


class Once:
    """The expected values of one batch, computed once."""

    def __init__(self, inner):
        self.log_probs = inner.log_probs
        self._inner, self._kept = inner, {}

    def values(self, batch, dtype):
        if "values" not in self._kept:
            self._kept["values"] = self._inner.values(batch, dtype)
        return self._kept["values"]

    def noise(self, batch, dtype):
        if "noise" not in self._kept:
            self._kept["noise"] = self._inner.noise(batch, dtype)
        return self._kept["noise"]


@pytest.fixture(scope="module")
def batch(reference):
    made = batches.demo_batch(vocab_size=43, rows=16)
    made = batches.from_tensors(dict(made.batch), rows=16, multiple_of=4, temperature=0.8)
    batches.complete(made, reference.log_probs(made))
    return made


@pytest.fixture(scope="module")
def run(batch, model, reference):
    """``run(layout, fault)``: the comparison of one layout, spoiled or not."""
    with Pool() as pool:

        def once(layout, fault=None):
            (wanted,) = parse_layouts(layout, model=str(model))
            if fault is not None:
                wanted = replace(wanted, tamper=f"{FOLDER}/{fault}")
            (result,) = compare(batch, [wanted], expected=reference, pool=pool, layers=True)
            return result

        yield once


@pytest.mark.parametrize(
    "layout",
    [
        "megatron:dp=2+rows=2",
        "megatron:tp=2+sp+rows=2",
        "megatron:pp=2+rows=4",
        "megatron:pp=2+vpp=2+rows=4",
        "megatron:cp=2+rows=2",
        "megatron:tp=2+packed+fused",
        "fsdp:2",
        "fsdp:2+packed+ulysses=2",
    ],
)
def test_a_healthy_layout_is_quiet_in_every_layer(run, layout):
    result = run(layout)
    assert result.wrong == []
    assert result.found["first_wrong"] is None
    assert result.found["wrong_gradients"] == []
    assert result.found["max_abs_value_diff"] <= 1e-5
    assert result.found["max_abs_value_grad_diff"] <= 1e-6
    assert len(result.layers) == 2 + 4 * 3
    tellers = {gap.rank for gap in result.layers}
    assert tellers == ({0, 1} if "pp=2" in layout or "dp=2" in layout else tellers)
    assert None not in tellers


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_the_other_families_are_quiet_too(family, kind):
    folder = family(kind)
    expected = Reference(folder, layers=True, values=True)
    rows = dict(batches.demo_batch(vocab_size=43, rows=8).batch)
    rows = batches.from_tensors(rows, rows=8, multiple_of=2, temperature=1.0)
    batches.complete(rows, expected.log_probs(rows))
    layouts = parse_layouts("fsdp:2,megatron:tp=2+sp,megatron:pp=2+vpp=2", model=str(folder))
    with Pool() as pool:
        results = compare(rows, layouts, expected=expected, pool=pool, layers=True)
    assert [one.wrong for one in results] == [[], [], []]
    for one in results:
        assert max(one.found[f"max_abs_{name}_diff"] for name in ("logprob", "value")) <= 1e-5


def spoiled(run, layout, fault):
    result = run(layout, fault)
    assert not result.agree, fault
    return result


def test_wrong_qkv_interleave_is_found_in_its_layer_and_stage(run):
    result = spoiled(run, "megatron:pp=2+rows=4", "megatron_faults.py:wrong_qkv_interleave")
    assert result.found["first_wrong"] == LAYER_2
    gap = next(gap for gap in result.layers if gap.name == LAYER_2)
    assert gap.rank == 1  # the stage of layers 2 and 3
    assert all(g.agrees for g in result.layers[: result.layers.index(gap)])


def test_missing_all_reduce_on_norm_weights_is_found_in_those_gradients_alone(run):
    fault = "megatron_faults.py:norm_weights_not_summed_over_sequence_ranks"
    result = spoiled(run, "megatron:tp=2+sp+rows=2", fault)
    assert all(gap.agrees for gap in result.layers)
    assert "max_abs_logprob_diff" not in result.wrong
    assert result.found["first_wrong"] == "gradient model.layers.0.input_layernorm.weight"
    names = result.found["wrong_gradients"]
    assert len(names) >= 4 * 2 + 1
    assert all("norm" in name for name in names)
    assert result.found["gradient_factor"] is None


def test_padded_vocabulary_in_the_softmax_is_found_in_the_output_layer(run):
    fault = "megatron_faults.py:padded_vocabulary_in_the_softmax"
    result = spoiled(run, "megatron:tp=2+rows=2", fault)
    assert all(gap.agrees for gap in result.layers)
    assert result.found["first_wrong"] == "lm_head"


def test_loss_scaled_by_micro_batch_count_is_found_as_one_factor_of_all_gradients(run):
    result = spoiled(run, "megatron:dp=2+rows=2", "layout_faults.py:scaled_by_micro_batches")
    assert result.found["first_wrong"] == "gradient model.embed_tokens.weight"
    assert result.found["gradient_factor"] == pytest.approx(1 / 4, rel=1e-3)  # 8 rows, 2 at a time
    assert set(result.wrong) <= {"max_abs_grad_diff", "rel_update_diff"}


def test_dropped_last_micro_batch_is_found_in_the_gradients(run):
    result = spoiled(run, "megatron:dp=2+rows=2", "layout_faults.py:last_micro_batch_dropped")
    assert result.found["first_wrong"].startswith("gradient ")
    assert result.found["gradient_factor"] is None
    assert all(gap.agrees for gap in result.layers)


def test_unequal_micro_batch_counts_are_found_in_the_gradients(run):
    result = spoiled(run, "megatron:dp=2+rows=2", "layout_faults.py:one_rank_drops_its_last")
    assert result.found["first_wrong"].startswith("gradient ")
    assert all(gap.agrees for gap in result.layers)


def test_a_value_head_whose_gradient_is_summed_over_its_copies_is_found_there_alone(run):
    result = spoiled(run, "megatron:tp=2+sp+rows=2", "megatron_faults.py:value_gradient_summed")
    assert result.found["first_wrong"] == "value_head"
    assert result.wrong == ["max_abs_value_grad_diff"]


def test_context_parallel_without_zigzag_positions_is_found_in_the_first_attention(run):
    fault = "megatron_faults.py:context_parallel_without_zigzag"
    result = spoiled(run, "megatron:cp=2+rows=2", fault)
    assert result.found["first_wrong"] == FIRST_ATTENTION


def test_left_padding_into_a_rope_that_ignores_positions_is_found_in_the_first_attention(
    run, batch
):
    result = spoiled(run, "megatron:dp=2+rows=2", "megatron_faults.py:left_padding_kept")
    assert result.found["first_wrong"] == FIRST_ATTENTION
    row, _ = next(gap for gap in result.layers if not gap.agrees).worst
    assert not batch.batch["attention_mask"][row, 0]  # a row that is padded on the left
