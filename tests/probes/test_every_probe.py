"""Every probe has run, has failed, and is silent over healthy steps; and says what it lacks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dataproto_audit.codes import CAUSES
from dataproto_audit.probes import PROBES
from dataproto_audit.testing.healthy import Boundary, Options

from . import (
    test_advantages,
    test_dynamics,
    test_groups,
    test_logprobs,
    test_loss,
    test_masks,
    test_meta,
    test_prefixes_and_trie,
    test_ranks,
    test_rewards,
)
from ._corrupt import Case, audit, run_case

FAMILIES = (
    test_advantages, test_dynamics, test_groups, test_logprobs, test_loss, test_masks,
    test_meta, test_prefixes_and_trie, test_ranks, test_rewards,
)  # fmt: skip
CASES: dict[str, list[Case]] = {name: [] for name in PROBES}
for _family in FAMILIES:
    for _case in _family.CASES:
        CASES[_case.probe].append(_case)

HEALTHY = {
    "default": Options(),
    "one rank, one prompt": Options(prompts=1, ranks=1),
    "no repeat": Options(n=1, prompts=8),
    "unbalanced": Options(balanced=False),
    "equal prompts": Options(duplicate_prompts=True),
    "equal rewards": Options(equal_groups=True),
    "no reference": Options(reference=False),
    "kl in reward": Options(kl_in_reward=True),
    "critic": Options(critic=True),
    "entropy": Options(entropy=True, mini_batches=2),
    "multi turn": Options(multi_turn=True, response_width=8),
    "half": Options(dtype="bfloat16", response_width=12, prompts=8),
    "later step": Options(step=7, mini_batches=4, ranks=4),
    "rloo": Options(estimator="rloo", norm_by_std=False),
    "without std": Options(norm_by_std=False),
    "sequence mean": Options(loss_agg_mode="seq-mean-token-mean"),
    "warm": Options(temperature=0.6),
    "one token only": Options(one_token=99, truncated=0),
    "no stop": Options(one_token=0, truncated=99),
    "long": Options(response_width=80, prompt_width=20),
}


@pytest.mark.parametrize("name", list(HEALTHY))
@pytest.mark.parametrize("seed", [0, 1])
def test_a_healthy_step_is_silent(name: str, seed: int) -> None:
    ran = audit(replace(HEALTHY[name], seed=seed))
    assert not ran.bad(), "\n".join(map(str, ran.bad()))
    assert not [f for f in ran.auditor.findings if f.code.startswith("DPA9")]


def test_every_probe_has_a_verdict_over_a_healthy_step() -> None:
    history = {name: [0.5] * 20 for name in ("actor/ppo_kl", "actor/kl_loss", "actor/grad_norm")}
    ran = audit(Options(entropy=True), history=history)
    assert set(PROBES) <= ran.auditor.fired
    assert not ran.bad()


@pytest.mark.parametrize("name", list(PROBES))
def test_every_probe_has_failed(name: str) -> None:
    assert CASES[name], f"{name} needs a corruption in the table of its family"
    case = CASES[name][0]
    ran = run_case(case)
    assert name in ran.auditor.fired
    findings = ran.findings(name, case.at or case.stage)
    assert findings
    assert set(findings[0].causes) <= set(CAUSES)


@pytest.mark.parametrize(
    ("name", "stage"), [(name, stage) for name in PROBES for stage in PROBES[name].stages]
)
def test_every_probe_runs_at_all_its_stages(name: str, stage: str) -> None:
    options = Options(entropy=True)
    outcome = audit(options, until=stage).outcome(name, stage)
    spikes = name.endswith("_spike")
    assert outcome.kind == ("not_checkable" if spikes else "passed")


def _needs() -> list[tuple[str, str]]:
    out = []
    for name, probe in PROBES.items():
        beside = [need for need in probe.needs if "." in need]
        out += [(name, need) for need in (*probe.fields, *beside)]
    return out


def _reason(need: str) -> str:
    source, _, rest = need.partition(".")
    known = {"settings": "setting unknown: ", "evidence": "not recorded: "}
    return known[source] + rest if rest else f"field not in the batch: {need}"


@pytest.mark.parametrize(("name", "need"), _needs())
def test_without_what_it_needs_a_probe_says_so(name: str, need: str) -> None:
    probe = PROBES[name]
    source, _, rest = need.partition(".")

    def dropped(b: Boundary) -> Any:
        if source == "evidence":
            b.batch.meta_info.pop(rest, None)
            if isinstance(b.evidence, dict):
                b.evidence.pop(rest, None)
        elif not rest:
            if b.batch.batch is not None and need in b.batch.batch.keys():  # noqa: SIM118
                del b.batch.batch[need]
            b.batch.non_tensor_batch.pop(need, None)

    stage = probe.stages[0]
    settings = {rest: None} if source == "settings" else {}
    options = Options(entropy=True)
    ran = audit(options, {stage: dropped}, until=stage, settings=settings)
    outcome = ran.outcome(name, stage)
    assert (outcome.kind, outcome.reason) == ("not_checkable", _reason(need))
    assert name not in ran.auditor.fired or stage == "ref_log_prob"
