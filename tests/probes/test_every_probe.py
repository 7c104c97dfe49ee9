"""Every probe has run, has failed, and is silent over healthy steps; and says what it lacks."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from dataproto_audit.codes import CAUSES
from dataproto_audit.probes import PROBES
from dataproto_audit.probes.registry import AT_END
from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import HISTORY, Case, audit, run_case

MODULES = [path.stem for path in sorted(Path(__file__).parent.glob("test_*.py"))
           if path != Path(__file__)]  # fmt: skip
FAMILIES = [import_module(f".{name}", __package__) for name in MODULES]
CHECKED = [n for n, p in PROBES.items() if not p.run.__module__.endswith(".recompute")]
"""Probes that a simulated step reaches. Its policy is no model that one could recompute with."""
CASES: dict[str, list[Case]] = {name: [] for name in CHECKED}
for _family in FAMILIES:
    for _case in getattr(_family, "CASES", ()):
        CASES[_case.probe].append(_case)

RECORDED = Options(recorded=True, micro_rows=4)
SCENES: dict[str, Options] = {
    "tool_tokens_untrained": RECORDED,
    "masks_agree": RECORDED,
    "packed_rows": RECORDED,
    "attended_tokens": RECORDED,
    "rows_over_ranks": RECORDED,
    "rows_over_micro_batches": RECORDED,
    "long_enough_to_split": RECORDED,
    "row_fits_token_limit": Options(recorded=True, max_token_len=40),
    "own_micro_batch_size": RECORDED,
    "padding_rows_untrained": Options(recorded=True, prompts=3, pad_rows=4, micro_rows=4),
    "one_weight_version": RECORDED,
    "exactly_equal": Options(exact=True),
    "ref_equal_elsewhere": Options(exact=True, step=2, step_drift=0.0),
    "rows_alike": Options(dtype="bfloat16", prompts=1, n=4, seed=9),
    "entropy_of_the_sampled": Options(prompts=16, response_width=12, truncated=0, one_token=0),
    "reference_stays": Options(step=4),
    "advantage_inferred": Options(prompts=6),
    "ref_in_place": Options(step=30, response_width=16),
    "no_placeholder_values": Options(critic=True),
    "image_positions": Options(images=True),
    "token_types": Options(images=True),
    "samples_differ": Options(response_width=12),
    "kl_in_reward": Options(kl_in_reward=True),
    "unscorable_rows": RECORDED,
    "returns_recomputed": Options(critic=True),
    "importance_weights": Options(correction=True),
    "rollout_is_weights_finite": Options(correction=True),
    "weights_nonnegative": Options(correction=True),
    "model_scores_finite": RECORDED,
    "values_finite": Options(critic=True),
    "update_values_finite": Options(critic=True),
    "first_values": Options(critic=True),
    "value_loss_recomputed": Options(critic=True),
    "returns_cross_gaps": Options(multi_turn=True, response_width=8),
}
"""The healthy step at which a probe comes to a verdict, where the plain one has no such thing."""
UNTOLD: dict[str, Any] = {"one_weight_version": {"on_policy": None},
                          "tool_tokens_untrained": {"multi_turn": None},
                          "advantage_inferred": {"adv_estimator": None}}  # fmt: skip
"""Settings that would say why a field is missing, or leave a probe nothing to say."""
PLAIN = Options(entropy=True)
PAST: dict[str, Any] = {"actor/entropy": (2.9,) * 20, "audit/ref_gap_max": (0.2, 0.3)}
"""What earlier steps left for the checks of a batch that look back."""

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
    **{f"scene of {name}": options for name, options in SCENES.items()},
    "rejection": Options(correction=True),
    "bypass": Options(bypass=True),
    "aborted": Options(aborted=2),
    "garbage on padding": Options(pad_garbage=True),
}


@pytest.mark.parametrize("name", list(HEALTHY))
@pytest.mark.parametrize("seed", [0, 1])
def test_a_healthy_step_is_silent(name: str, seed: int) -> None:
    ran = audit(replace(HEALTHY[name], seed=seed))
    assert not ran.bad(), "\n".join(map(str, ran.bad()))
    assert not [f for f in ran.auditor.findings if f.code.startswith("DPA9")]


def test_every_probe_has_a_verdict_over_healthy_steps() -> None:
    fired: set[str] = set()
    jumpy = ("actor/ppo_kl", "actor/kl_loss", "actor/grad_norm")
    spikes = PAST | {name: [0.5] * 20 for name in jumpy}
    scenes = {(options, ""): {} for options in (PLAIN, *SCENES.values())}
    scenes |= {(SCENES[name], name): UNTOLD[name] for name in UNTOLD}
    for (options, _), settings in scenes.items():
        ran = audit(options, history=spikes, settings=settings)
        fired |= ran.auditor.fired
        assert not ran.bad(), "\n".join(map(str, ran.bad()))
    ran = audit(until=AT_END, history=HISTORY)
    assert not ran.bad()
    assert set(CHECKED) <= fired | ran.auditor.fired


@pytest.mark.parametrize("name", CHECKED)
def test_every_probe_has_failed(name: str) -> None:
    assert CASES[name], f"{name} needs a corruption in the table of its family"
    case = CASES[name][0]
    ran = run_case(case)
    assert name in ran.auditor.fired
    findings = ran.findings(name, case.at or case.stage)
    assert findings
    assert set(findings[0].causes) <= set(CAUSES)


@pytest.mark.parametrize(
    ("name", "stage"), [(name, stage) for name in CHECKED for stage in PROBES[name].stages]
)
def test_every_probe_runs_at_all_its_stages(name: str, stage: str) -> None:
    past, scene = HISTORY if stage == AT_END else PAST, SCENES.get(name, PLAIN)
    if stage in ("values", "update_critic"):
        scene = replace(scene, critic=True)
    settings = UNTOLD.get(name)
    outcome = audit(scene, until=stage, history=past, settings=settings).outcome(name, stage)
    spikes = name.endswith("_spike")
    assert outcome.kind == ("not_checkable" if spikes else "passed")


def _needs() -> list[tuple[str, str]]:
    out = []
    for name in CHECKED:
        probe = PROBES[name]
        beside = [need for need in probe.needs if "." in need]
        out += [(name, need) for need in (*probe.fields, *beside)]
    return out


def _reason(need: str) -> str:
    source, _, rest = need.partition(".")
    known = {
        "settings": "setting unknown: ",
        "evidence": "not recorded: ",
        "history": "no earlier steps of ",
    }
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
                if rest == "metrics" and b.stage == AT_END:
                    b.evidence.clear()  # there, they are the metrics
        elif not rest:
            if b.batch.batch is not None and need in b.batch.batch.keys():  # noqa: SIM118
                del b.batch.batch[need]
            b.batch.non_tensor_batch.pop(need, None)

    stage = probe.stages[0]
    settings = UNTOLD.get(name, {}) | ({rest: None} if source == "settings" else {})
    ran = audit(SCENES.get(name, PLAIN), {stage: dropped}, until=stage, settings=settings)
    outcome = ran.outcome(name, stage)
    assert (outcome.kind, outcome.reason) == ("not_checkable", _reason(need))
    assert name not in ran.auditor.fired or stage in ("ref_log_prob", "dispatch")
