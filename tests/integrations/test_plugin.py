"""``dataproto_audit.verl_plugin`` in processes of their own: cheap, inert unless asked for."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAKE = Path(__file__).parent / "fake_verl"
HEAVY = ("pandas", "transformers", "torch", "numpy", "pyarrow", "tensordict", "ray", "yaml",
         "dataproto_audit.auditor")  # fmt: skip

REPORT = """
import sys, json
print(json.dumps([m for m in {heavy!r} if m in sys.modules]))
print(any(type(f).__name__ == "OnImport" for f in sys.meta_path))
"""


def python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("DATAPROTO_AUDIT")}
    kept |= {k: v for k, v in os.environ.items() if k.endswith("TEST_SESSION")}
    env = kept | {"PYTHONPATH": f"{ROOT}{os.pathsep}{FAKE}"} | environ
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True,
        timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "waits"),
    [
        ({}, False),
        ({"DATAPROTO_AUDIT": "1"}, True),
        ({"DATAPROTO_AUDIT": "0"}, False),
        ({"VERL_USE_EXTERNAL_MODULES": "a.b,dataproto_audit.verl_plugin"}, True),
        ({"VERL_USE_EXTERNAL_MODULES": "dataproto_audit.verl_plugin", "DATAPROTO_AUDIT": "off"},
         False),
    ],
)  # fmt: skip
def test_importing_is_cheap_and_inert_unless_asked_for(
    environ: dict[str, str], waits: bool
) -> None:
    done = python("import dataproto_audit.verl_plugin" + REPORT.format(heavy=HEAVY), **environ)
    heavy, waiting = done.stdout.splitlines()
    assert heavy == "[]"
    assert waiting == str(waits)
    assert done.stderr == ""


def test_a_wrong_setting_is_told_and_training_starts() -> None:
    done = python(
        "import dataproto_audit.verl_plugin as p; print(p.active)",
        DATAPROTO_AUDIT="1", DATAPROTO_AUDIT_ON_FAIL="stop",
    )  # fmt: skip
    assert done.stdout == "False\n"
    assert "raise, warn, record" in done.stderr
    assert "not attached" in done.stderr


def test_by_environment_alone(tmp_path: Path) -> None:
    """The stand-in loads the module as verl does; the trainer is audited from its making on."""
    (tmp_path / "verl-0.7.1.dist-info").mkdir()
    (tmp_path / "verl-0.7.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: verl\nVersion: 0.7.1\n"
    )
    code = f"""
import sys
sys.path[:0] = [{str(tmp_path)!r}, {str(Path(__file__).parent)!r}]
import verl
import verl.trainer.ppo.ray_trainer as module
from conftest import make
make(module).fit()
"""
    run_dir = tmp_path / "run"
    python(
        code,
        VERL_USE_EXTERNAL_MODULES="dataproto_audit.verl_plugin",
        DATAPROTO_AUDIT_RUN_DIR=str(run_dir),
    )
    from dataproto_audit import open_run

    run = open_run(run_dir)
    assert run.findings() == []
    assert run.summary["observed"]["advantage.after"] == 1
    assert run.summary["verl"] == "0.7.1"


def test_both_trainers_are_waited_for() -> None:
    done = python(
        "import sys, dataproto_audit.verl_plugin\n"
        "print(sorted(f.name for f in sys.meta_path if type(f).__name__ == 'OnImport'))",
        DATAPROTO_AUDIT="1",
    )
    assert "verl.trainer.ppo.ray_trainer" in done.stdout
    assert "verl.trainer.ppo.v1.trainer_base" in done.stdout


def test_the_entry_point_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["verl.plugins"] == {
        "dataproto_audit": "dataproto_audit.verl_plugin"
    }
