"""Which stage broke a step: the first wrong one, every later one that is wrong by itself, the rows
and the tokens, and what clears the stages before.

::

    verdict = bisect("reports/run", policy="models/policy", reference="models/ref")
    print(verdict.story()); verdict.stage, verdict.rows, verdict.tokens, verdict.later_faults

Cheap stages are checked and recomputed, model stages recomputed at most once each; nothing is
generated again. :mod:`.suspects` says what counts as wrong by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dc_field
from pathlib import Path
from typing import Any, Literal

from dataproto_audit.codes import UsageError
from dataproto_audit.contracts.stages import STAGES
from dataproto_audit.dump.trace import Trace
from dataproto_audit.findings import plain
from dataproto_audit.policy import Policy
from dataproto_audit.probes import PROBES, Settings
from dataproto_audit.reasons import NotRecorded
from dataproto_audit.replay.chosen import chosen_step
from dataproto_audit.replay.compared import Compared
from dataproto_audit.replay.origins import unread
from dataproto_audit.replay.predicates import asked
from dataproto_audit.replay.recompute import recomputed
from dataproto_audit.replay.replay import Replay, Replayed
from dataproto_audit.replay.scorers import Scorers, scorer_of
from dataproto_audit.replay.search import culprits
from dataproto_audit.replay.suspects import Blame, Fault, blamed
from dataproto_audit.replay.told import infos_of, told

State = Literal["healthy", "faulty", "undecided"]
NEEDED = ("rollout", "reward", "old_log_prob", "advantage")
"""Stages that a step must have left for it to be called healthy."""


@dataclass
class Verdict:
    """What a bisect found; :meth:`to_dict` has the stable keys."""

    verdict: State
    step: int
    stages: list[tuple[str, str, str]]
    """(stage, state, why) in the order of the loop; state is ``ok``, ``WRONG``, ``follows`` (an
    earlier fault explains it) or ``not judged``."""
    faults: list[Fault]
    cleared: list[dict[str, Any]]
    missing: list[str]
    recomputations: int
    compared: list[Compared] = dc_field(default_factory=list)
    row_keys: tuple[str, ...] = ()
    against: Any = None
    """What the comparison with a healthy run said, where one was given."""
    infos: list[dict[str, Any]] = dc_field(default_factory=list)
    """What the checks noted and do not call wrong: ``code``, ``stage``, ``field``, ``rows`` at
    ``boundary``, ``says``."""
    others: dict[str, list[int]] = dc_field(default_factory=dict)
    """Other steps of the trace: ``quiet`` ones, whose checks found nothing wrong, and those
    ``not_judged``."""
    meeting: dict[str, Any] | None = None
    """Rows that fail together and the number of predicate calls, where one was given."""

    @property
    def first(self) -> Fault | None:
        """The first wrong stage."""
        return self.faults[0] if self.faults else None

    @property
    def stage(self) -> str | None:
        """Its name."""
        named: str | None = self.to_tell["stage"]
        return named

    @property
    def rows(self) -> list[int]:
        """Rows at that stage's boundary."""
        return list(self.to_tell["rows"])

    @property
    def tokens(self) -> list[tuple[int, int]]:
        """(row, column) on the field's own last axis."""
        return [(row, column) for row, column in self.to_tell["tokens"]]

    @property
    def to_tell(self) -> dict[str, Any]:
        """The first fault as plain data: by the checks, else by the healthy run alone."""
        if self.first:
            return told(self.first)
        if self.verdict != "faulty" or self.against is None:
            return _NOTHING
        against = self.against.to_dict()
        return {
            **_NOTHING, **{key: against[key] for key in ("stage", "field", "rows", "tokens")},
            "row_keys": sorted(self.row_keys), "boundary": against["boundary"],
            "evidence": {"found by": "against", "says": against["text"]},
        }  # fmt: skip

    @property
    def not_believed(self) -> list[dict[str, Any]]:
        """Models that are not those of the run, once each: what ``says`` why, and numbers."""
        told = {c.missing: {"says": c.missing, **c.evidence} for c in self.compared
                if c.verdict == "unknown" and "option" in c.evidence}  # fmt: skip
        return list(told.values())

    @property
    def later_faults(self) -> list[dict[str, Any]]:
        """Every later stage that is wrong by itself."""
        return [told(fault) for fault in self.faults[1:]]

    def to_dict(self) -> dict[str, Any]:
        """Plain data with stable keys, ready for ``json.dumps``."""
        first = self.to_tell
        made = {
            "verdict": self.verdict,
            "step": self.step,
            **{key: first[key] for key in ("stage", "field", "rows", "tokens", "cause")},
            "row_keys": first["row_keys"],
            "boundary": first["boundary"],
            "cleared": self.cleared,
            "later_faults": self.later_faults,
            "evidence": first["evidence"],
            "recomputations": self.recomputations,
            "missing": self.missing,
            "not_believed": self.not_believed,
            "infos": self.infos,
            "other_steps": self.others,
            "stages": [{"stage": s, "state": state, "why": why} for s, state, why in self.stages],
        }
        if self.meeting is not None:
            made["fails_together"] = self.meeting
        if self.against is not None:
            made["against"] = self.against.to_dict()
        cleaned: dict[str, Any] = plain(made)
        return cleaned

    def story(self) -> str:
        """A few lines for a person."""
        from dataproto_audit.replay.story import story

        return story(self)


_NOTHING: dict[str, Any] = {
    "stage": None, "field": None, "rows": [], "tokens": [], "cause": None, "row_keys": [],
    "boundary": None, "evidence": {},
}  # fmt: skip


def bisect(
    path: str | Path,
    *,
    step: int | None = None,
    policy_model: Any = None,
    reference_model: Any = None,
    scorers: Scorers | None = None,
    sample: int | None = None,
    good: str | Path | None = None,
    predicate: Callable[[Any], Any] | None = None,
    config: Settings | None = None,
    policy: Policy | None = None,
) -> Verdict:
    """Find what broke a step of the trace at ``path``; default the first step that is not quiet.

    ``policy_model`` and ``reference_model`` are models, or folders of models, with the weights of
    that step; ``sample`` bounds the rows that they score. ``good`` is the trace of a healthy run.
    ``predicate`` runs something on a part of the batch that entered the wrong stage and says
    whether it fails; with it the rows that fail together are found by halving, for packing, leakage
    between rows, and gradients. Raises :class:`UsageError` for what cannot be read.
    """
    trace = Trace(path)
    again = Replay(config=config, policy=policy)
    chosen, others = chosen_step(trace, again, step)
    verdict = judged(chosen, scorers or _scorers(policy_model, reference_model, sample))
    verdict.others = others
    if good is not None:
        from dataproto_audit.replay.good import first_difference

        verdict.against = first_difference(chosen, Trace(good))
        if verdict.verdict != "faulty" and verdict.against.stage:
            by_comparison(verdict, chosen)
    if predicate is not None:
        verdict.meeting = _meeting(chosen, verdict.stage or "update_actor", predicate)
    return verdict


def by_comparison(verdict: Verdict, step: Replayed) -> None:
    """Only the healthy run tells what is wrong: its stage is no longer cleared, nor later ones."""
    against = verdict.against
    verdict.verdict = "faulty"
    order = [name for name, _, _ in verdict.stages]
    earlier = order[: order.index(against.stage)] if against.stage in order else order
    verdict.cleared = [item for item in verdict.cleared if item["stage"] in earlier]
    verdict.stages = [
        (name, "WRONG", against.text) if name == against.stage else (name, state, why)
        for name, state, why in verdict.stages
    ]
    keys = [s.boundary.row_keys for s in step.seen if s.boundary.name == against.boundary]
    verdict.row_keys = tuple(keys[0][r] for r in against.rows if r < len(keys[0])) if keys else ()


def _scorers(policy_model: Any, reference_model: Any, sample: int | None) -> Scorers:
    made = Scorers(sample=sample)
    made.policy = None if policy_model is None else scorer_of(policy_model)
    made.reference = None if reference_model is None else scorer_of(reference_model)
    return made


def _meeting(step: Replayed, stage: str, predicate: Callable[[Any], Any]) -> dict[str, Any]:
    """Rows of the batch that entered ``stage`` which fail together."""
    entered = step.before(stage)
    if entered is None:
        raise UsageError(
            "DPA820", f"the batch that entered {stage} was not recorded.", "Record whole steps."
        )
    boundary = entered.boundary
    everyone = range(entered.view.rows)

    def fails(rows: Sequence[int]) -> bool:
        part = boundary.view(rows=list(rows))
        told = {
            "batch": part.tensors, "non_tensor_batch": part.arrays, "meta_info": dict(part.meta),
        }  # fmt: skip
        return asked(predicate, told, whole=len(rows) == len(everyone))

    if not fails(everyone):
        return {"rows": [], "calls": 1, "says": "the whole batch does not fail"}
    rows, calls = culprits(everyone, fails)
    return {"rows": rows, "calls": calls + 1, "boundary": boundary.name}


def judged(step: Replayed, scorers: Scorers | None = None) -> Verdict:
    """The verdict on one replayed step."""
    scorers = scorers or Scorers()
    before = scorers.calls
    compared = recomputed(step, scorers)
    blame = blamed(step, compared)
    stages = _stages(step, compared, blame)
    missing = _missing(step, compared, blame)
    state: State = "faulty" if blame.faults else "healthy"
    lost = any(step.after(name) is None for name in NEEDED)
    if not blame.faults and (lost or _unsure(compared)):
        state = "undecided"
    return Verdict(
        state, step.step.number, stages, blame.faults, _cleared(step, compared, blame), missing,
        scorers.calls - before, compared, infos=infos_of(step),
    )  # fmt: skip


def _unsure(compared: Sequence[Compared]) -> bool:
    """True where a model was not believed, and no engine of its own speaks for the record."""
    return any(c.verdict == "unknown" and c.evidence.get("witnessed") is False for c in compared)


# -- stages ----------------------------------------------------------------------------------------


def _stages(
    step: Replayed, compared: Sequence[Compared], blame: Blame
) -> list[tuple[str, str, str]]:
    wrong = {fault.stage: fault for fault in blame.faults}
    follow = {one.stage: fault for fault in blame.faults for one in fault.follow}
    passed = _passed(step)
    out = []
    for name in _recorded(step, wrong):
        if name in wrong:
            out.append((name, "WRONG", wrong[name].lead.text))
        elif name in follow:
            out.append((name, "follows", f"explained by {follow[name].stage}"))
        elif any(c.verdict == "agrees" for c in compared if c.stage == name) or passed.get(name):
            out.append((name, "ok", _why(name, compared, passed)))
        else:
            out.append((name, "not judged", "nothing of what it made could be checked there"))
    return out


def _recorded(step: Replayed, wrong: Mapping[str, Any]) -> list[str]:
    seen = {one.boundary.stage for one in step.seen} | set(wrong)
    return [name for name in STAGES if name in seen]


def _passed(step: Replayed) -> dict[str, int]:
    out: dict[str, int] = {}
    for one in step.seen:
        if unread(one):
            continue
        number = sum(outcome.kind == "passed" for outcome in one.report.outcomes)
        out[one.boundary.stage] = out.get(one.boundary.stage, 0) + number
    return out


def _why(name: str, compared: Sequence[Compared], passed: Mapping[str, int]) -> str:
    agreed = [c for c in compared if c.stage == name and c.verdict == "agrees"]
    parts = [
        f"{c.field} recomputed, max |difference| {c.evidence.get('max |difference|', 0.0):.2g}"
        for c in agreed
    ]
    if passed.get(name):
        parts.append(f"{passed[name]} checks passed")
    return "; ".join(parts)


def _cleared(step: Replayed, compared: Sequence[Compared], blame: Blame) -> list[dict[str, Any]]:
    """Stages before the first fault, or all of a healthy step, with what clears each."""
    out = []
    for name, state, why in _stages(step, compared, blame):
        if state == "WRONG":
            break
        if state == "ok":
            out.append({"stage": name, "by": why})
    return out


def _missing(step: Replayed, compared: Sequence[Compared], blame: Blame) -> list[str]:
    """What was not recorded or not given, and how to have it next time."""
    unknown: dict[str, list[str]] = {}
    for text in (c.missing for c in compared if c.verdict == "unknown" and c.missing):
        name, colon, why = text.partition(": ")
        named = bool(colon) and " " not in name
        unknown.setdefault(why if named else text, []).append(name if named else "")
    out = [
        f"{', '.join(dict.fromkeys(names))}: {why}" if all(names) else why
        for why, names in unknown.items()
    ]
    absent = [name for name in NEEDED if step.after(name) is None]
    if absent:
        out.append(
            f"no batch that left {', '.join(absent)}: record whole steps (audit.trace=last:1, or "
            "trace=last:1 when attached)"
        )
    if step.step.ended == "unfinished":
        out.append("the step was cut off while it was written: only its finished boundaries count")
    lost = sorted({
        outcome.reason for one in step.seen for outcome in one.report.outcomes
        if outcome.kind == "not_checkable" and isinstance(outcome.reason, NotRecorded)
    })  # fmt: skip
    out += lost + _either(step, compared, blame)
    return list(dict.fromkeys(out))


def _either(step: Replayed, compared: Sequence[Compared], blame: Blame) -> list[str]:
    """Where two log-probs of a token disagree and nothing recorded tells which of them is wrong."""
    doubts = [one.doubt for fault in blame.faults for one in fault.all if one.doubt]
    pair = {"old_log_probs", "ref_log_prob"}
    sampled = step.after("rollout")
    third = sampled is not None and "rollout_log_probs" in sampled.view.tensors
    if third or any(c.model and c.field in pair and c.verdict != "unknown" for c in compared):
        return doubts
    if any(f.lead.field == "ref_log_prob" and f.lead.check in PROBES
           and pair <= set(PROBES[f.lead.check].fields) for f in blame.faults):  # fmt: skip
        return [
            *doubts,
            "old_log_prob or ref_log_prob: nothing recorded tells which of the two is wrong; keep "
            "the engine's log-probs (calculate_log_probs), or pass --model DIR",
        ]
    return doubts
