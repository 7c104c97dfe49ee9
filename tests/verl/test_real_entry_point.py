"""A real run of verl 0.9.1 that finds the audit by its entry point alone, into a used folder."""

import re

import pytest

from dataproto_audit import __version__, open_run
from dataproto_audit.dump.run_folder import RunFolder

from .configs import QUIET, V1
from .looks import GRPO, made, seen_in_v1
from .runs import run

pytestmark = [pytest.mark.verl, pytest.mark.engine]


def test_a_restarted_job_is_audited_by_the_entry_point_alone(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """``DATAPROTO_AUDIT=1`` and no module named; the run before it did not finish."""
    folder = made("0.9.1", tmp_path_factory)
    RunFolder.create(folder / "run", config={}).close()
    done = run(
        "0.9.1", folder, *QUIET, *V1, steps=1, audit=False, DATAPROTO_AUDIT="1",
        DATAPROTO_AUDIT_RUN_DIR=str(folder / "run"), DATAPROTO_AUDIT_WORKERS="1",
        DATAPROTO_AUDIT_LEVEL="",
    )  # fmt: skip
    assert done.code == 0, done.log[-5000:]
    assert not open_run(folder / "run").finished
    audited = open_run(folder / "run-2")
    said = [str(f) for f in audited.findings() if f.severity != "info"]
    assert not said, "\n".join(said)
    assert set(audited.summary["observed"]) == seen_in_v1(*GRPO) - {"validation.after"}
    outcomes = audited.table("outcomes")
    told = outcomes[(outcomes["stage"] == "update_actor") & (outcomes["kind"] == "passed")]
    assert {"DPA501", "DPA502", "DPA701", "DPA703"} <= set(told["code"])  # workers found the driver
    assert not list(folder.glob("run*/ranks*"))
    assert f"It is kept as it is; this run is written into {folder}/run-2." in done.log
    begins = re.findall(r"dataproto-audit: .* audits .*", done.log)
    ends = re.findall(r"dataproto-audit: \d+ steps, .*", done.log)
    assert (len(begins), len(ends)) == (1, 1)
    assert f"{__version__} audits PPOTrainer" in begins[0]
    assert "level full, on_fail warn, workers, too" in begins[0]
    assert f"tables in {folder}/run-2" in begins[0]
    assert "1 steps, " in ends[0]
    assert "findings: 0 fail, 0 warn, " in ends[0]
