"""The pages under docs/: generated ones are current, examples run, links lead somewhere."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from dataproto_audit.auditor import Auditor
from dataproto_audit.contracts.fields import FIELDS
from dataproto_audit.contracts.stages import STAGES
from dataproto_audit.dump.run import open_run
from dataproto_audit.dump.schema import TABLES
from dataproto_audit.findings import Report
from dataproto_audit.probes import PROBES
from dataproto_audit.protocol import DataProto

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def generator():
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["codes.md", "fields.md", "configuration.md"])
def test_a_generated_page_is_what_the_code_says(name):
    written = (DOCS / name).read_text(encoding="utf-8")
    assert written == generator().PAGES[name](), "run: python docs/generate.py"


@pytest.fixture
def undo():
    """Take back what the examples register."""
    kept = dict(FIELDS), dict(STAGES), dict(PROBES)
    yield
    for registry, before in zip((FIELDS, STAGES, PROBES), kept, strict=True):
        registry.clear()
        registry.update(before)


def test_the_examples_for_extending_work(undo, capsys):
    text = (DOCS / "extending.md").read_text(encoding="utf-8")
    tensors = {
        "responses": torch.ones(2, 3, dtype=torch.long),
        "response_mask": torch.ones(2, 3, dtype=torch.long),
        "teacher_log_probs": torch.tensor([[-1.0, -1.0, -1.0], [-1.0, 0.5, -1.0]]),
    }
    batch = DataProto.from_dict(tensors, non_tensors={"uid": np.array(["a", "b"], object)})
    names: dict[str, object] = {"batch": batch}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        assert len([line for line in block.splitlines() if line.strip()]) <= 15
        exec(compile(block, "extending.md", "exec"), names)
    assert "ACME1 fail" in capsys.readouterr().out
    report, auditor = names["report"], names["auditor"]
    assert isinstance(report, Report)
    assert isinstance(auditor, Auditor)
    [finding] = [f for f in report.findings if f.code == "ACME1"]
    assert finding.columns == {1: (1,)}
    tensors["teacher_log_probs"] = torch.ones(2, 3, dtype=torch.long)
    wrong = DataProto.from_dict(tensors, non_tensors={"uid": np.array(["a", "b"], object)})
    auditor.begin_step(2)
    assert "DPA102" in {f.code for f in auditor.boundary("teacher", wrong).findings}


@pytest.mark.parametrize(
    "page", sorted([*DOCS.glob("*.md"), ROOT / "README.md"]), ids=lambda p: p.name
)
def test_relative_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_example_run_can_be_read():
    run = open_run(ROOT / "reports" / "example")
    assert [f.code for f in run.findings()] == ["DPA205"]
    assert run.summary["stopped_by"]["stage"] == "rollout"
    for name in TABLES:
        assert len(run.table(name)), name
