"""docs/verl-flow.md against the released wheels: every line it names, every default, every order.

References are inline code: ``0.7.1 trainer/ppo/ray_trainer.py:1230 def fit`` (what stands in that
line of the file below ``verl/``), and ``0.7.1 config KEY = VALUE`` or ``megatron`` instead of
``config`` (values of the generated YAML). Read from ``.venvs`` where they are, else from the wheel.
"""

import re
import zipfile
from functools import cache

import pytest
import yaml
from omegaconf import OmegaConf

from dataproto_audit.codes import CODES
from dataproto_audit.doctor.defects import DEFECTS
from dataproto_audit.doctor.planned import DEFAULTS, FOLLOWS, OF_VERSION, VERSIONS
from tests.test_protocol_verl_suite import ROOT, verl_wheel

PAGE = (ROOT / "docs" / "verl-flow.md").read_text(encoding="utf-8")
CODE = [a or b for a, b in re.findall(r"``(.+?)``|`([^`]+)`", PAGE)]
LINE = re.compile(r"(0\.\d\.\d) (\S+\.py):(\d+) (.+)")
VALUE = re.compile(r"(0\.\d\.\d) (config|megatron) (\S+) = (\S+)")
LINES = [m.groups() for text in CODE if (m := LINE.fullmatch(text))]
VALUES = [m.groups() for text in CODE if (m := VALUE.fullmatch(text))]
YAML = {"config": "_generated_ppo_trainer.yaml", "megatron": "_generated_ppo_megatron_trainer.yaml"}
IN_ORDER = ("One step of `RayPPOTrainer.fit` (V0)", "One step of `PPOTrainer` (V1, 0.9.1)")


@cache
def source(version: str, path: str) -> str:
    [*sites] = (ROOT / ".venvs" / f"verl-{version}" / "lib").glob("python3*/site-packages")
    if sites:
        return (sites[0] / "verl" / path).read_text(encoding="utf-8")
    with zipfile.ZipFile(verl_wheel(version)) as wheel:
        return wheel.read(f"verl/{path}").decode("utf-8")


@cache
def defaults(version: str, kind: str = "config"):
    return OmegaConf.create(source(version, f"trainer/config/{YAML[kind]}"))


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_the_page_makes_the_claims_that_are_tested_here():
    assert len(LINES) > 80
    assert len(VALUES) > 8
    started = [t for t in CODE if re.match(r"0\.\d\.\d \S", t)]
    assert len(started) == len(LINES) + len(VALUES), "a reference is written in another form"


def test_codes_and_defects_of_the_page_exist():
    assert set(re.findall(r"DPA\d{3}", PAGE)) <= set(CODES)
    for defect in DEFECTS:
        row = f"| {defect.number} | {', '.join(defect.versions)} | {defect.text} |"
        assert row in PAGE


@pytest.mark.verl_wheel
@pytest.mark.parametrize(("version", "path", "line", "text"), LINES)
def test_the_line_holds_what_the_page_says(version, path, line, text):
    lines = source(version, path).splitlines()
    near = [i for i, found in enumerate(lines, 1) if text in found]
    assert text in lines[int(line) - 1], f"it stands in {near}"


@pytest.mark.verl_wheel
@pytest.mark.parametrize(("version", "kind", "key", "value"), VALUES)
def test_the_default_is_what_the_page_says(version, kind, key, value):
    assert OmegaConf.select(defaults(version, kind), key) == yaml.safe_load(value)


@pytest.mark.parametrize("title", IN_ORDER)
def test_steps_are_listed_in_the_order_of_the_source(title):
    found: dict[tuple[str, str], list[int]] = {}
    for row in section(title).splitlines():
        for text in re.findall(r"`([^`]+)`", row) if row.startswith("|") else ():
            if m := LINE.fullmatch(text):
                found.setdefault((m[1], m[2]), []).append(int(m[3]))
    assert found
    for places in found.values():
        assert places == sorted(places)
        assert len(places) > 8


@pytest.mark.verl_wheel
@pytest.mark.parametrize("version", VERSIONS)
def test_what_doctor_takes_as_default_is_verls(version):
    for key, value in (DEFAULTS | OF_VERSION[version]).items():
        assert OmegaConf.select(defaults(version), key) == value, key
    raw = OmegaConf.to_container(defaults(version), resolve=False)
    for key, target in FOLLOWS.items():
        node = raw
        for part in key.split("."):
            node = node[part]
        assert target in str(node), key


@pytest.mark.verl_wheel
def test_defects_stand_in_the_source_of_the_version_they_are_said_of():
    balancing = "utils/seqlen_balancing.py"
    assert "Cannot satisfy max_token_len" not in source("0.7.1", balancing)  # D10
    assert "Cannot satisfy max_token_len" in source("0.9.1", balancing)
    assert "dp_group" not in source("0.7.1", "workers/actor/dp_actor.py")  # D9
    for version in VERSIONS:  # D5
        loop = source(version, "experimental/agent_loop/agent_loop.py")
        assert 'result["reward_extra_info"]' in loop
        assert 'return {"reward_score": rm_score}' in source(
            version, "experimental/reward_loop/reward_loop.py"
        )
    with pytest.raises((FileNotFoundError, KeyError)):  # the legacy workers are gone
        source("0.9.1", "workers/fsdp_workers.py")
