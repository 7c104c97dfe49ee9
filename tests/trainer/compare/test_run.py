"""Layouts of the FSDP backend against one process, and faults that the comparison must find.

Four processes are started once; every layout of this module runs in them.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dataproto_audit.codes import RunError, UsageError
from dataproto_audit.commands.compare_backends import Reference
from dataproto_audit.trainer.compare import batches, run
from dataproto_audit.trainer.compare.layouts import parse_layouts
from dataproto_audit.trainer.compare.pool import Pool
from dataproto_audit.trainer.compare.run import check, compare
from dataproto_audit.trainer.models import TinyModel, write_tiny_model

FAULTS = Path(__file__).parent / "layout_faults.py"
LAYOUTS = [
    "fsdp:1",
    "fsdp:2",
    "fsdp:2+tokens=30",
    "fsdp:2+packed+tokens=30",
    "fsdp:2+fused+wrap=layer",
    "fsdp:2+packed+ulysses=2",
    "fsdp:4+size=2",
    "fsdp:4+wrap=layer+reshard=2",
    "fsdp:4+packed+ulysses=4+wrap=layer+fused",
    "fsdp:4+packed+ulysses=2+size=2+reshard=1",
]
GRADIENT = {"max_abs_grad_diff"}
SEEN = {"max_abs_logprob_diff", "rel_loss_diff", "max_abs_grad_diff"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    sizes = TinyModel(charset="arithmetic", max_position_embeddings=64, initializer_range=0.2)
    return write_tiny_model(tmp_path_factory.mktemp("model"), sizes)


@pytest.fixture(scope="module")
def reference(model):
    """The expected values, computed once."""
    inner, kept = Reference(model), {}

    class Kept:
        log_probs = staticmethod(inner.log_probs)

        @staticmethod
        def values(batch, dtype):
            if "values" not in kept:
                kept["values"] = inner.values(batch, dtype)
            return kept["values"]

        @staticmethod
        def noise(batch, dtype):
            if "noise" not in kept:
                kept["noise"] = inner.noise(batch, dtype)
            return kept["noise"]

    return Kept


@pytest.fixture(scope="module")
def batch(model, reference):
    made = batches.demo_batch(vocab_size=42, rows=16)
    made = batches.from_tensors(dict(made.batch), rows=16, multiple_of=4, temperature=0.8)
    assert batches.complete(made, reference.log_probs(made)) == [
        "old_log_probs", "ref_log_prob", "advantages", "values", "returns",
    ]  # fmt: skip
    return made


@pytest.fixture(scope="module")
def pool():
    with Pool() as started:
        yield started


@pytest.mark.engine
def test_every_layout_agrees_with_one_process(batch, model, reference, pool):
    layouts = parse_layouts(",".join(LAYOUTS), model=str(model))
    results = compare(batch, layouts, expected=reference, pool=pool)
    assert {one.layout.name: one.wrong for one in results} == {name: [] for name in LAYOUTS}
    for one in results:
        assert one.found["max_abs_logprob_diff"] <= 1e-5, one.layout.name
        assert one.found["max_abs_entropy_diff"] <= 1e-5, one.layout.name
        assert one.found["rel_loss_diff"] <= 1e-6, one.layout.name
        assert one.found["max_abs_grad_diff"] <= 1e-6, one.layout.name
        assert one.found["rel_update_diff"] <= 1e-3, one.layout.name
    by_name = {one.layout.name: one.to_dict() for one in results}
    check_measures(by_name)


def check_measures(by_name):
    alone, two, four = (
        by_name[name] for name in ("fsdp:1", "fsdp:2", "fsdp:4+wrap=layer+reshard=2")
    )
    whole = alone["ranks"][0]["held_bytes"]
    assert whole["gradients"] == whole["parameters"]
    assert whole["optimizer"] >= 2 * whole["parameters"]
    for entry, ranks in ((two, 2), (four, 4)):
        for rank in entry["ranks"]:
            assert rank["held_bytes"]["parameters"] == pytest.approx(
                whole["parameters"] / ranks, rel=0.02
            )
    calls = two["ranks"][0]["comm_calls"]
    assert (calls["all_gather"], calls["reduce_scatter"]) == (1, 1)
    assert two["ranks"][0]["comm_bytes"]["all_gather"] == pytest.approx(
        whole["parameters"], rel=0.01
    )
    assert "all_to_all" in by_name["fsdp:2+packed+ulysses=2"]["ranks"][0]["comm_calls"]
    assert alone["comm_bytes"] == 0
    for entry in by_name.values():
        assert sum(entry["ranks"][0]["peak_by_kind"].values()) <= entry["peak_bytes"]
        assert entry["step_cpu_s"] > 0


@pytest.mark.engine
@pytest.mark.parametrize(
    ("fault", "layout", "wrong"),
    [
        ("scaled_by_micro_batches", "fsdp:2", GRADIENT),
        ("last_micro_batch_dropped", "fsdp:2", GRADIENT),
        ("one_rank_drops_its_last", "fsdp:2", GRADIENT),
        ("averaged_over_ranks", "fsdp:2", GRADIENT),
        ("one_gradient_not_reduced", "fsdp:2", GRADIENT),
        ("temperature_forgotten", "fsdp:2", SEEN),
        ("rows_see_each_other", "fsdp:2+packed", SEEN),
        ("tokens_not_exchanged", "fsdp:2+packed+ulysses=2", SEEN),
        ("positions_begin_anew_on_each_rank", "fsdp:2+packed+ulysses=2", SEEN),
    ],
)
def test_a_fault_is_found_and_only_what_it_spoils(
    batch, model, reference, pool, fault, layout, wrong
):
    (spoiled,) = parse_layouts(layout, model=str(model))
    spoiled = replace(spoiled, tamper=f"{FAULTS}:{fault}")
    (result,) = compare(batch, [spoiled], expected=reference, pool=pool)
    assert not result.agree
    assert set(result.wrong) >= wrong
    if wrong == GRADIENT:
        assert "max_abs_logprob_diff" not in result.wrong
    if fault == "one_gradient_not_reduced":
        assert result.found["worst_gradient"] == "model.norm.weight"


def test_layouts_that_cannot_work_are_refused_before_anything_starts(batch, model, reference):
    class Never:
        def run(self, tasks):
            raise AssertionError("started")

    for text, fragment in [
        ("fsdp:3+size=2", "size=2 does not divide 3 ranks"),
        ("fsdp:2+ulysses=2", "packed is off"),
        ("fsdp:3+packed+ulysses=3", "cannot share 4 heads"),
        ("fsdp:4+reshard=3", "no part of 4 ranks"),
    ]:
        with pytest.raises(UsageError, match=fragment):
            compare(batch, parse_layouts(text, model=str(model)), expected=reference, pool=Never())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("megatron:cp=2+packed", "DPA851 .*packed packs rows"),
        ("megatron:pp=2+rows=16", "DPA854 .*1 micro-batches .* 2 pipeline stages"),
    ],
)
def test_limits_of_megatron_hold_for_layouts_as_for_configurations(model, text, message):
    (layout,) = parse_layouts(text, model=str(model))
    with pytest.raises(UsageError, match=message):
        check(layout, rows=16)
    (layout,) = parse_layouts("megatron:pp=2", model=str(model))
    check(layout, rows=7)


def test_a_layout_that_fails_is_a_result_and_the_next_one_runs(
    batch, model, reference, monkeypatch
):
    def run_layout(batch, layout, pool, **_):
        raise RunError("DPA864", f"{layout.name} ended.", "Leave it out.")

    monkeypatch.setattr(run, "run_layout", run_layout)
    pool = SimpleNamespace(start=lambda _: None, close=lambda: None)
    layouts = parse_layouts("fsdp:1,fsdp:2", model=str(model))
    results = compare(batch, layouts, expected=reference, pool=pool)
    assert [one.agree for one in results] == [False, False]
    assert results[1].to_dict() == {
        "name": "fsdp:2", "agree": False, "wrong": ["DPA864 fsdp:2 ended. Leave it out."],
        "ranks": [],
    }  # fmt: skip
