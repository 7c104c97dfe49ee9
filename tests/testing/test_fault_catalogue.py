"""The catalogue of faults: what each says of itself, and that it changes something."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dataproto_audit.auditor import Auditor
from dataproto_audit.catalogue import CAUSES
from dataproto_audit.contracts.stages import STAGES
from dataproto_audit.testing import faults
from dataproto_audit.testing.bases import BASES
from dataproto_audit.testing.faults import CATALOGUE, FAULTS, Truth, seeded
from dataproto_audit.testing.faults.scene import Scene
from dataproto_audit.testing.healthy import boundaries

PACKAGE = Path(faults.__file__).parent
ALLOWED = ("dataproto_audit.codes", "dataproto_audit.protocol", "dataproto_audit.reference",
           "dataproto_audit.testing.faults", "dataproto_audit.testing.toy_policy")  # fmt: skip


def test_there_are_enough_and_half_of_them_come_from_public_cases() -> None:
    from_cases = [fault for fault in CATALOGUE.values() if fault.origin]
    assert len(CATALOGUE) >= 120
    assert 2 * len(from_cases) >= len(CATALOGUE)
    assert set(FAULTS) <= set(CATALOGUE)
    assert len({fault.meaning for fault in CATALOGUE.values()}) == len(CATALOGUE)


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_fault_says_what_it_is(name: str) -> None:
    fault = CATALOGUE[name]
    assert fault.name == name
    assert fault.meaning.endswith(".")
    assert set(fault.stages) <= set(STAGES)
    assert fault.stages[0] == fault.stage
    assert fault.field == fault.fields[0]
    assert fault.cause
    assert set(fault.causes) <= set(CAUSES)
    assert fault.bases
    assert set(fault.bases) <= set(BASES)
    assert all(case[0] in "BC" and case[1:].isdigit() for case in fault.origin)
    assert fault.tuned or name not in FAULTS


def test_faults_know_nothing_of_probes_and_contracts() -> None:
    wrong = []
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            ours = [name for name in names if name.startswith("dataproto_audit")]
            wrong += [f"{path.name}: {name}" for name in ours if not name.startswith(ALLOWED)]
    assert wrong == []


def same(old: object, new: object) -> bool:
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        return old.shape == new.shape and old.dtype == new.dtype and torch.equal(old, new)
    return repr(old) == repr(new)


def state(scene: Scene) -> dict[str, object]:
    """Everything that a fault at a boundary may change."""
    batch = scene.boundary.batch
    if isinstance(batch, dict):
        return {f"part {name}": id(value) for name, value in batch.items()}
    tensors = {} if batch.batch is None else dict(batch.batch.items())
    arrays = {f"array {name}": array.tolist() for name, array in batch.non_tensor_batch.items()}
    return {**tensors, **arrays, "meta": dict(batch.meta_info),
            "evidence": dict(scene.boundary.evidence)}  # fmt: skip


def changes(name: str, base: str) -> bool:
    """Whether the fault changes anything of a step on ``base``; its truth fits the field."""
    fault = CATALOGUE[name]
    options = replace(BASES[base], **fault.options)
    if fault.where in ("sampling", "before_sync"):
        given = {"temperature": 1.0, "top_p": 1.0, "layer.2": 5}
        more = () if fault.where == "sampling" else ({"layer.2": 4},)
        return bool(fault.apply(given, *more) != given)
    runs = []

    def prepared(run: object) -> None:
        runs.append(run)
        if fault.where == "start":
            before = repr({**vars(run), "random": None})
            fault.apply(Scene(run))
            runs.append(repr({**vars(run), "random": None}) != before)

    for b in boundaries(options, prepared=prepared):
        if fault.where == "start":
            return bool(runs[1]) or options != BASES[base]
        when = "after" if fault.where == "after_stage" else "before"
        if (b.stage, b.when) == (fault.stage, when):
            scene = Scene(runs[0], b)
            before = state(scene)
            truth = fault.apply(scene)
            assert set(truth.columns) <= set(truth.rows)
            after = state(scene)
            return set(before) != set(after) or any(not same(before[k], after[k]) for k in before)
    raise AssertionError(f"{fault.stage} is no stage of {base}")


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_fault_changes_something(name: str) -> None:
    bases = CATALOGUE[name].bases
    assert all(changes(name, base) for base in dict.fromkeys((bases[0], bases[-1])))


@pytest.mark.parametrize("base", sorted(BASES))
def test_bases_are_quiet_without_a_fault(base: str) -> None:
    options = BASES[base]
    auditor = Auditor(options.settings(), on_fail="record")
    for step in (options.step, options.step + 1):
        auditor.begin_step(step)
        metrics: dict[str, object] = {}
        for b in boundaries(replace(options, step=step)):
            auditor.boundary(b.stage, b.batch, when=b.when, evidence=b.evidence)
            metrics |= b.evidence.get("metrics", {})
        auditor.end_step(metrics)
    assert [str(f) for f in auditor.findings if f.severity != "info"] == []


def test_a_name_is_registered_once() -> None:
    def uid_per_row(scene: Scene) -> Truth:
        """Again."""
        return Truth("uid")

    with pytest.raises(ValueError, match="uid_per_row"):
        seeded("union", "uid", cause="split_group")(uid_per_row)
