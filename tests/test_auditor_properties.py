"""What holds of any step: allowed changes stay quiet, bad input is never a fault of our own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from dataproto_audit import check
from dataproto_audit.auditor import MAX_FINDINGS, Auditor
from dataproto_audit.batch import BatchView
from dataproto_audit.contracts.stages import STAGES
from dataproto_audit.probes import PROBES, Settings
from dataproto_audit.protocol import DataProto
from dataproto_audit.testing.healthy import Boundary, Options, boundaries

Change = Callable[[Boundary], Any]


def audited(options: Options, change: Change = lambda b: b.batch, **how: Any) -> Auditor:
    """One step; ``change`` gives the batch that the auditor sees at each boundary."""
    settings = how.pop("settings", options.settings())
    auditor = Auditor(settings, on_fail="record", **how)
    auditor.begin_step(options.step)
    for b in boundaries(options):
        auditor.boundary(b.stage, change(b), when=b.when, evidence=b.evidence)
    auditor.end_step()
    return auditor


def loud(auditor: Auditor) -> list[str]:
    return [str(f) for f in auditor.findings if f.severity != "info"]


configurations = st.builds(
    Options,
    prompts=st.sampled_from([2, 4, 6]),
    n=st.sampled_from([2, 3, 4]),
    prompt_width=st.integers(1, 7),
    response_width=st.integers(1, 9),
    seed=st.integers(0, 10_000),
    step=st.sampled_from([1, 2, 7]),
    ranks=st.sampled_from([1, 2]),
    mini_batches=st.sampled_from([1, 2]),
    micro_rows=st.integers(1, 4),
    balanced=st.booleans(),
    one_token=st.integers(0, 6),
    truncated=st.integers(0, 6),
    duplicate_prompts=st.booleans(),
    equal_groups=st.booleans(),
    entropy=st.booleans(),
    multi_turn=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    estimator=st.sampled_from(["grpo", "rloo", "opo", "gpg", "grpo_passk"]),
    norm_by_std=st.booleans(),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    vocab=st.sampled_from([4, 32, 200]),
    loss_agg_mode=st.sampled_from(
        ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
    ),
)


@given(configurations)
def test_any_healthy_step_is_quiet(options: Options) -> None:
    assert loud(audited(options)) == []


@given(configurations, st.randoms(use_true_random=False))
def test_balancing_may_choose_any_order(options: Options, random: Any) -> None:
    options = replace(options, balanced=True)
    order = list(range(options.prompts * options.n))
    random.shuffle(order)

    def change(b: Boundary) -> DataProto:
        if (b.stage, b.when) == ("balance", "after"):
            b.batch.reorder(torch.tensor(order))
            b.batch.meta_info.pop("global_token_num", None)  # counted after the balance
        return b.batch

    assert loud(audited(options, change)) == []


def jagged(batch: DataProto) -> TensorDict | None:
    """The batch without padding and without an attention mask, rows of their own lengths."""
    if batch.batch is None:
        return None
    fields = dict(batch.batch.items())
    width, used = fields["prompts"].shape[1], fields.pop("attention_mask") != 0
    prompt, response = used[:, :width].sum(1).tolist(), used[:, width:].sum(1).tolist()
    out: dict[str, torch.Tensor] = {}
    for name, tensor in fields.items():
        if tensor.dim() == 1:
            out[name] = tensor
            continue
        start, end = ([0] * len(prompt), response)
        if name == "prompts":
            start, end = [width - n for n in prompt], [width] * len(prompt)
        elif name in ("input_ids", "position_ids"):
            start = [width - n for n in prompt]
            end = [width + n for n in response]
        rows = [tensor[i, a:b].clone() for i, (a, b) in enumerate(zip(start, end, strict=True))]
        out[name] = torch.nested.nested_tensor(rows, layout=torch.jagged)
    return TensorDict(out, batch_size=[len(prompt)])


@pytest.mark.parametrize(
    "options",
    [Options(), Options(multi_turn=True, response_width=9, entropy=True), Options(critic=True)],
)
def test_a_jagged_step_says_what_the_padded_one_says(options: Options) -> None:
    def change(b: Boundary) -> dict[str, Any]:
        return {
            "batch": jagged(b.batch),
            "non_tensor_batch": b.batch.non_tensor_batch,
            "meta_info": b.batch.meta_info,
        }

    padded, other = audited(options), audited(options, change)
    assert loud(other) == []
    assert other.outcomes == padded.outcomes


# -- bad input -------------------------------------------------------------------------------------


def _with_cell(tensor: torch.Tensor, value: float) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[tensor.numel() // 2] = value if tensor.is_floating_point() else int(value)
    return tensor


def _inference(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tensor + 0


TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "gone": lambda t: None,
    "float": lambda t: t.float(),
    "bool": lambda t: t != 0,
    "int": lambda t: t.long(),
    "half": lambda t: t.bfloat16(),
    "float8": lambda t: t.float().to(torch.float8_e4m3fn),
    "complex": lambda t: t.to(torch.complex64),
    "all NaN": lambda t: torch.full(t.shape, float("nan")),
    "one NaN": lambda t: _with_cell(t.float(), float("nan")),
    "one infinity": lambda t: _with_cell(t.float(), float("-inf")),
    "one negative": lambda t: _with_cell(t, -5),
    "one huge": lambda t: _with_cell(t, 2.0**40),
    "no rows": lambda t: t[:0],
    "no columns": lambda t: t.reshape(len(t), -1)[:, :0],
    "one row less": lambda t: t[:-1],
    "twice the rows": lambda t: torch.cat([t, t]),
    "twice the columns": lambda t: torch.cat([t, t], -1),
    "flat": lambda t: t.reshape(-1),
    "deeper": lambda t: t.unsqueeze(-1),
    "one number": lambda t: t.reshape(-1)[0],
    "negative": lambda t: -t,
    "backwards": lambda t: t.flip(0),
    "transposed in memory": lambda t: t.T.contiguous().T if t.dim() == 2 else t,
    "sparse": lambda t: t.to_sparse(),
    "numpy": lambda t: t.float().numpy(),
    "read-only": lambda t: np.broadcast_to(t.float().numpy(), t.shape),
    "with gradient": lambda t: t.float().requires_grad_(),
    "inference": _inference,
    "list": lambda t: t.tolist(),
    "jagged": lambda t: torch.nested.nested_tensor(
        [torch.ones(1 + i % 3) for i in range(len(t))], layout=torch.jagged
    ),
    "strided nested": lambda t: torch.nested.nested_tensor(
        [torch.ones(1 + i % 3) for i in range(len(t))]
    ),
}
ARRAYS: dict[str, Callable[[np.ndarray], Any]] = {
    "gone": lambda a: None,
    "shorter": lambda a: a[:-1],
    "nothing": lambda a: np.array([None] * len(a), object),
    "numbers": lambda a: np.arange(len(a)),
    "texts": lambda a: np.array([str(v) for v in a.tolist()]),
    "backwards": lambda a: a[::-1],
    "two axes": lambda a: np.zeros((len(a), 2)),
    "no axis": lambda a: np.array(3),
    "NaN": lambda a: np.array([float("nan")] * len(a), object),
    "lists": lambda a: _objects([[i] for i in range(len(a))]),
    "arrays": lambda a: _objects([np.arange(i % 4) for i in range(len(a))]),
    "tensors": lambda a: _objects([torch.ones(2) for _ in a]),
}


def _changed(change: Callable[[Any], Any], value: Any) -> Any:
    """What becomes of the field; as it was where torch cannot do that to it."""
    try:
        return change(value)
    except (RuntimeError, TypeError):
        return value


def _objects(values: list[Any]) -> np.ndarray:
    out = np.empty(len(values), object)
    for row, value in enumerate(values):
        out[row] = value
    return out


@given(st.data())
def test_bad_input_is_a_finding_or_a_clear_outcome_and_never_our_fault(data: Any) -> None:
    options = Options(
        prompts=data.draw(st.sampled_from([1, 2])),
        n=data.draw(st.sampled_from([1, 2])),
        ranks=1,
        critic=data.draw(st.booleans()),
        dtype=data.draw(st.sampled_from(["float32", "bfloat16"])),
    )
    step = list(boundaries(options))
    at = data.draw(st.integers(0, len(step) - 1), label="boundary")
    keep = data.draw(st.booleans(), label="also later")
    chosen = step[at].batch
    tensors = [] if chosen.batch is None else list(chosen.batch.keys())
    names = [*tensors, *chosen.non_tensor_batch]
    field = data.draw(st.sampled_from(sorted(names) or [""]), label="field")
    tensor = data.draw(st.sampled_from(sorted(TENSORS)), label="tensor becomes")
    array = data.draw(st.sampled_from(sorted(ARRAYS)), label="array becomes")
    settings = data.draw(st.sampled_from([options.settings(), Settings()]))
    auditor = Auditor(settings, on_fail="record")
    auditor.begin_step(1)
    for place, b in enumerate(step):
        parts = {
            "batch": {} if b.batch.batch is None else dict(b.batch.batch.items()),
            "non_tensor_batch": dict(b.batch.non_tensor_batch),
            "meta_info": b.batch.meta_info,
        }
        if place == at or (keep and place > at):
            for part, changes, how in (("batch", TENSORS, tensor),
                                       ("non_tensor_batch", ARRAYS, array)):  # fmt: skip
                if field in parts[part]:
                    value = _changed(changes[how], parts[part].pop(field))
                    if value is not None:
                        parts[part][field] = value
        report = auditor.boundary(b.stage, parts, when=b.when, evidence=b.evidence)
        assert report.outcomes
    auditor.end_step()
    assert [str(f) for f in auditor.findings if f.code.startswith("DPA9")] == []


# -- coverage of the checks themselves -------------------------------------------------------------


def test_every_contract_comes_to_a_verdict_somewhere() -> None:
    fired: set[str] = set()
    for options in (Options(), Options(critic=True), Options(kl_in_reward=True)):
        fired |= audited(options).fired
    batch = next(b for b in boundaries(Options()) if b.stage == "update_actor").batch
    dispatched = {outcome.check for outcome in check(batch, config={"dp_size": 2}).outcomes}
    assert "dispatch.fields" in dispatched  # workers get their rows between two boundaries
    for name, stage in STAGES.items():
        if name == "dispatch":
            continue
        assert f"{name}.fields" in fired
        if not stage.own_input:
            assert {f"{name}.rows", f"{name}.unchanged"} <= fired, name


def test_a_single_saved_batch_is_checked_by_the_probes_of_all_earlier_stages() -> None:
    options = Options(prompts=8)
    last = next(b for b in boundaries(options) if (b.stage, b.when) == ("update_actor", "after"))
    auditor = Auditor(options.settings(), on_fail="record")
    report = auditor.boundary("update_actor", last.batch, evidence=last.evidence)
    assert report.ok
    checks = {outcome.check: outcome.kind for outcome in report.outcomes}
    assert checks["mask_on_padding"] == checks["advantage_recomputed"] == "passed"
    assert checks["first_ratio"] == checks["group_size"] == "passed"
    assert "uid_per_prompt" not in checks  # holds before the repeat only
    assert checks["update_actor.rows"] == "not_checkable"
    last.batch.batch["response_mask"][:, -1] = 1
    found = Auditor(options.settings(), on_fail="record").boundary("update_actor", last.batch)
    assert "DPA205" in {finding.code for finding in found}


def test_a_field_that_stays_broken_is_reported_once() -> None:
    def change(b: Boundary) -> DataProto:
        fields = b.batch.batch
        if fields is not None and "old_log_probs" in fields.keys():  # noqa: SIM118
            fields["old_log_probs"] = fields["old_log_probs"].long()
        return b.batch

    auditor = audited(Options(reference=False), lambda b: b.batch)
    assert loud(auditor) == []
    seen = Auditor(Options(reference=False).settings(), on_fail="record")
    seen.begin_step(1)
    for b in list(boundaries(Options(reference=False))):
        seen.boundary(b.stage, change(b), when=b.when, evidence=b.evidence)
    broken = [f for f in seen.findings if f.code == "DPA102"]
    assert [(f.stage, f.field) for f in broken] == [("old_log_prob", "old_log_probs")]
    assert seen.outcomes["not_checkable"] > auditor.outcomes["not_checkable"]


def test_findings_beyond_the_limit_are_counted_all_the_same(monkeypatch: Any) -> None:
    monkeypatch.setattr("dataproto_audit.auditor.MAX_FINDINGS", 3)

    def change(b: Boundary) -> DataProto:
        if b.batch.batch is not None and b.when == "after":
            b.batch.batch["response_mask"] = torch.ones_like(b.batch.batch["response_mask"])
        return b.batch

    options = replace(Options(prompts=8), balanced=False)
    auditor = Auditor(options.settings(), on_fail="record")
    for step in range(1, 6):
        auditor.begin_step(step)
        for b in boundaries(replace(options, step=step)):
            if b.stage in ("prompts", "rollout"):
                auditor.boundary(b.stage, change(b), when=b.when, evidence=b.evidence)
    assert len(auditor.findings) == 3 < auditor.severities["fail"]
    assert MAX_FINDINGS >= 100


@pytest.mark.parametrize(
    ("part", "code"),
    [("run_probes", "DPA901"), ("wrong_fields", "DPA902"), ("missing_fields", "DPA902")],
)
def test_a_fault_in_any_part_of_our_own_does_not_stop_training(
    part: str, code: str, monkeypatch: Any
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(f"dataproto_audit.auditor.{part}", fails)
    options = Options(prompts=2)
    auditor = audited(options)
    assert {f.code for f in auditor.findings} == {code}
    assert len(auditor.findings) == len({f.check for f in auditor.findings})
    assert auditor.boundaries == len(list(boundaries(options)))


def test_unknown_fields_are_listed() -> None:
    def change(b: Boundary) -> DataProto:
        b.batch.non_tensor_batch["request_id"] = _objects([object() for _ in range(len(b.batch))])
        return b.batch

    options = Options(prompts=2, n=2)
    auditor = Auditor(options.settings(), on_fail="record", probes=PROBES)
    auditor.begin_step(1)
    for b in boundaries(options):
        if b.stage == "prompts":
            auditor.boundary(b.stage, change(b), when=b.when)
    assert auditor.undeclared == {"request_id"}
    assert BatchView.of(None).names == ()
