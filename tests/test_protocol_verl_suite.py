"""verl's own tests of its batch type, run against ours.

The wheels of verl ship them. They are downloaded by pip into a folder that git ignores and run in
a scratch folder, where a package named ``verl`` stands in: its DataProto is ours, and only
``verl.utils.tensordict_utils``, which the tests import, is taken from the wheel. Nothing is
excluded.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "verl"
SUITE = "tests/test_protocol_on_cpu.py"
UTILITIES = "verl/utils/tensordict_utils.py"
SHIM = {
    "verl/__init__.py": "from dataproto_audit.protocol import DataProto\n",
    "verl/protocol.py": "from dataproto_audit.protocol import *\n",
    "verl/utils/__init__.py": "",
    "pytest.ini": "[pytest]\n",
}
PASSED = {"0.7.1": 37, "0.9.1": 38}


def verl_wheel(version: str) -> Path:
    wheel = CACHE / f"verl-{version}-py3-none-any.whl"
    if not wheel.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, f"verl=={version}", "--dest", str(CACHE)], check=True)
    return wheel


def build_shim(version: str, folder: Path) -> None:
    for name, text in SHIM.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with zipfile.ZipFile(verl_wheel(version)) as wheel:
        (folder / UTILITIES).write_bytes(wheel.read(UTILITIES))
        (folder / Path(SUITE).name).write_bytes(wheel.read(SUITE))


@pytest.mark.verl_wheel
@pytest.mark.parametrize("method", ["torch", "numpy"])
@pytest.mark.parametrize("version", PASSED)
def test_verl_suite_passes_on_our_dataproto(version, method, tmp_path):
    build_shim(version, tmp_path)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        "VERL_DATAPROTO_SERIALIZATION_METHOD": method,
    }
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", Path(SUITE).name, "--junitxml=result.xml"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    suite = ET.parse(tmp_path / "result.xml").getroot()[0]
    counts = {name: int(suite.get(name)) for name in ("tests", "errors", "failures", "skipped")}
    expected = {"tests": PASSED[version], "errors": 0, "failures": 0, "skipped": 0}
    assert counts == expected, run.stdout[-4000:] + run.stderr[-2000:]
