"""What looks wrong in a replayed step, and whether an earlier fault explains it.

A suspect is a failed check or a field that differs from its recomputation. It is *independent*
when it would be there without the faults before it:

* a stage whose recorded output differs from what its own recorded inputs give is wrong by itself;
  one that agrees is not, whatever a check says of the values that were compared;
* what is compared across a boundary (kept rows and fields, notes of ranks, checksums) and what an
  estimator or a loss must give speaks for itself, too;
* a comparison of two fields is explained when one of them, or what both depend on, was spoilt by
  earlier faults in all the rows it names;
* what is impossible whatever the batch is (a negative entropy) is explained by no other field;
* after rows were lost or repeated, other counts that do not fit follow from that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import field as dc_field

from dataproto_audit.contracts.fields import FIELDS
from dataproto_audit.contracts.stages import STAGES
from dataproto_audit.probes import PROBES
from dataproto_audit.replay.compared import Compared
from dataproto_audit.replay.placed import (
    ORDER,
    Keys,
    Suspect,
    by_a_third,
    of_compared,
    of_finding,
    traced,
)
from dataproto_audit.replay.replay import Replayed

COUNTS = frozenset({"DPA104", "DPA109", "DPA113", "DPA117", "DPA701", "DPA415"})
"""Codes that a wrong number of rows sets off again at later stages."""
BETWEEN_FIELDS = frozenset({
    "DPA401", "DPA402", "DPA403", "DPA404", "DPA405", "DPA411", "DPA412", "DPA414", "DPA415",
    "DPA501", "DPA505",
})  # fmt: skip
"""Of the checks of groups, rewards and losses, those that do not recompute an output."""
WITNESSED = frozenset({"DPA303", "DPA304"})
"""Codes that compare a log-prob with another one of the same token, so that they name each cell."""
OF_LOG_PROBS = WITNESSED | {"DPA305", "DPA306", "DPA307", "DPA309", "DPA501"}
"""Codes that a log-prob which agrees with the model's cannot be the reason of."""
SETTINGS = frozenset({"DPA111", "DPA112"})
AFTER_COUNTS = COUNTS | {"DPA502", "DPA703"}
ACROSS = frozenset({"DPA104", "DPA105", "DPA106", "DPA107", "DPA113", "DPA114", "DPA116"})
"""Codes of what a boundary kept: they compare a stage with its own input."""
SOMEWHERE = frozenset({"DPA307"})
"""Codes that name cells of which one is wrong, and not which."""
COMPARED = ("responses", "input_ids", "attention_mask", "response_mask")
"""What a rollout makes at once: a check that compares two of these cannot tell which is wrong."""
IDS_AND_MASKS = (*COMPARED, "prompts", "position_ids")
LOG_PROBS = ("rollout_log_probs", "old_log_probs", "ref_log_prob", "update_log_probs", "entropys")
UNDER_LOG_PROBS = (
    "prompts", "responses", "input_ids", "attention_mask", "position_ids", "temperature",
    "sampling",
)  # fmt: skip
"""What every log-prob depends on, whether or not a check reads it."""
UNDER_COLUMNS = ("responses", "input_ids", "attention_mask")
"""What the column of a log-prob depends on: another prompt or temperature moves none."""
POSSIBLE = frozenset({"rollout_log_probs_nonpositive", "old_log_probs_nonpositive",
                      "ref_log_prob_nonpositive", "entropy_bounds"})  # fmt: skip
"""Checks of what a number may be at all: no token, prompt or temperature makes it so."""
OF_GROUPS = frozenset({"DPA401", "DPA402", "DPA403", "DPA404"})
"""Codes of prompts and uids that do not belong together: which of the two is wrong is not known."""


@dataclass
class Fault:
    """A stage that is wrong by itself. ``lead`` says what and where, ``others`` what goes along."""

    lead: Suspect
    others: list[Suspect] = dc_field(default_factory=list)
    follow: list[Suspect] = dc_field(default_factory=list)
    """What this fault explains at later stages."""

    @property
    def stage(self) -> str:
        """The stage."""
        return self.lead.stage

    @property
    def all(self) -> list[Suspect]:
        """Everything that is wrong at the stage."""
        return [self.lead, *self.others]


def suspects(step: Replayed, compared: Iterable[Compared]) -> list[Suspect]:
    """Everything wrong, in the order of the boundaries; recomputed fields before checks there."""
    out = [of_compared(step, c) for c in compared if c.verdict == "differs"]
    for number, finding in step.sighted():
        if finding.severity != "info" and finding.stage:
            one = of_finding(step, number, finding)
            out.append(one if one.code in ACROSS | COUNTS else traced(step, one))
    return sorted(out, key=lambda s: (s.boundary, _rank(s)))


def _rank(suspect: Suspect) -> int:
    """What leads at one boundary: what the stage itself changed, broken ids and masks, then what
    names its cells exactly."""
    if suspect.code in ACROSS:
        return 0
    if suspect.check != "recomputed":
        # Rows of one uid with several prompts: the prompts are what the uid is compared with.
        return 1 if suspect.field in UNDER_LOG_PROBS and suspect.code != "DPA402" else 4
    return 2 if suspect.model else 3 if suspect.tokens else 5


class Blame:
    """Goes through the suspects of a step and keeps those that nothing before them explains."""

    def __init__(self, step: Replayed, compared: Sequence[Compared]) -> None:
        self.step, self.compared = step, compared
        self.agreed = {(c.stage, c.field): c for c in compared if c.verdict == "agrees"}
        self.differing = {(c.stage, c.field) for c in compared if c.verdict == "differs"}
        self.faults: list[Fault] = []
        self.explained: list[Suspect] = []
        self._spoilt: dict[str, list[tuple[Keys, Fault]]] = {}
        self._counts: Fault | None = None

    def take(self, suspect: Suspect) -> None:
        """Add one suspect: to a fault of its stage, to what a fault explains, or as a new fault."""
        cause = self._cause(suspect)
        if cause is not None:
            cause.follow.append(suspect)
            self.explained.append(suspect)
            return
        if self._cleared(suspect):
            self.explained.append(suspect)
            return
        if self._modelled(suspect):
            self._accuse(suspect)
            return
        explained = [keys for keys, _ in self._before(suspect) if keys is not None]
        for part in by_a_third(self.step, suspect, frozenset().union(*explained)):
            self._accuse(part)

    def _accuse(self, suspect: Suspect) -> None:
        fault = next((f for f in self.faults if f.stage == suspect.stage), None)
        if fault is None:
            fault = Fault(suspect)
            self.faults.append(fault)
        else:
            fault.others.append(suspect)
        if suspect.code in COUNTS and suspect.field in ("", "rows", "batch_size"):
            self._counts = self._counts or fault
        # Prompts are not rows yet, and a setting holds for all of them.
        whole = suspect.stage == "prompts" or suspect.code in SETTINGS
        for name in _spoils(suspect):
            self._spoilt.setdefault(name, []).append((None if whole else suspect.keys, fault))

    def _modelled(self, suspect: Suspect) -> bool:
        """True where a model told already whether the field is wrong."""
        return suspect.check == "recomputed" or any(
            (c.field, c.model) == (suspect.field, True)
            for c in self.compared if c.verdict != "unknown"
        )  # fmt: skip

    def _cleared(self, suspect: Suspect) -> bool:
        """True where the very cells that a check names agree with their recomputation."""
        if suspect.code not in OF_LOG_PROBS:
            return False
        agreed = self.agreed.get((suspect.stage, suspect.field))
        if agreed is None or agreed.looked is None or not agreed.model or not suspect.tokens:
            return False
        shape = agreed.looked.shape
        return all(
            row < shape[0]
            and all(column < shape[1] and agreed.looked[row, column] for column in cs)
            for row, cs in suspect.tokens.items()
        )

    def _cause(self, suspect: Suspect) -> Fault | None:
        """The earlier fault that explains the suspect; None where it stands for itself."""
        if suspect.check == "recomputed":
            return None if suspect.tokens else self._counts
        counts, said = self._counts, (suspect.code, suspect.field)
        if counts is not None and counts.stage != suspect.stage and suspect.code in AFTER_COUNTS:
            return counts
        for fault in self.faults:  # said again of a field that is wrong already
            if fault.stage != suspect.stage and said in {(o.code, o.field) for o in fault.all}:
                return fault
        if suspect.code in ACROSS:
            return None
        if suspect.code == "DPA402" and (sampled := self._sampled_after(suspect.keys)):
            return sampled
        not_finite = "non_finite" in suspect.causes
        if _stands_alone(suspect) and not not_finite:
            return None
        parts: dict[str, Fault] = {}
        for keys, fault in self._before(suspect):
            if keys is None:
                return fault
            parts |= dict.fromkeys(keys - parts.keys(), fault)
            if suspect.keys is not None and suspect.keys <= parts.keys():
                return next(parts[key] for key in sorted(suspect.keys)) if suspect.keys else fault
        if not_finite:
            return self._not_finite(suspect)
        return None

    def _before(self, suspect: Suspect) -> Iterator[tuple[Keys, Fault]]:
        """What earlier stages spoilt of the fields that the check reads, with the rows."""
        for name in _reads(suspect):
            for keys, fault in self._spoilt.get(name, ()):
                if fault.stage == suspect.stage or (
                    name == suspect.field and (suspect.stage, name) in self.differing
                ):
                    continue
                if keys is None or not _hardly_seen(suspect, name, keys, fault):
                    yield keys, fault

    def _sampled_after(self, keys: Keys) -> Fault | None:
        """Where a model says that the engine sampled these very rows after other ids: the rollout
        left wrong prompts with them, and another than their group's is the same fault."""
        for fault in self.faults:
            lead = fault.lead
            if lead.model and lead.field == "rollout_log_probs" and keys and lead.keys == keys:
                return fault
        return None

    def _not_finite(self, suspect: Suspect) -> Fault | None:
        """NaN spreads: into metrics, losses, and every row of a group or a whitened batch."""
        place = ORDER.get(suspect.stage, 0)
        for fault in self.faults:
            # Of a value out of its bounds it is one cause of several.
            spread = any(one.causes[:1] == ("non_finite",) for one in fault.all)
            if spread and (fault.lead.boundary, ORDER.get(fault.stage, 0)) < (
                suspect.boundary, place,
            ):  # fmt: skip
                return fault
        return None


def _stands_alone(suspect: Suspect) -> bool:
    """True for checks that recompute an output from the inputs beside it, or read notes only."""
    if suspect.code[:4] in ("DPA7",) or suspect.code.startswith("DPA60"):
        return True
    if suspect.code in BETWEEN_FIELDS:
        return False
    return suspect.code[:4] in ("DPA4", "DPA5")


def _hardly_seen(suspect: Suspect, name: str, keys: frozenset[str], fault: Fault) -> bool:
    """True where most rows whose prompt may be wrong have log-probs that fit: the uid was wrong."""
    of_uid = fault.lead.code in OF_GROUPS and name in UNDER_LOG_PROBS
    return of_uid and suspect.keys is not None and 2 * len(suspect.keys & keys) < len(keys)


def _reads(suspect: Suspect) -> list[str]:
    """Fields that the check's verdict depends on."""
    if suspect.check in POSSIBLE:
        return [suspect.field]
    probe = PROBES.get(suspect.check)
    names = list(probe.fields) if probe else []
    if suspect.field:
        names.append(suspect.field)
    if any(name in LOG_PROBS for name in names):
        moved = suspect.code == "DPA304" and suspect.causes[:1] == ("shift",)
        names += UNDER_COLUMNS if moved else UNDER_LOG_PROBS
    return list(dict.fromkeys(names))


def _spoils(suspect: Suspect) -> list[str]:
    """Fields that can no longer be trusted: of a setting, all that its stage writes with it."""
    name = suspect.field.split(".")[-1]
    declared = FIELDS.get(name)
    probe = PROBES.get(suspect.check)
    if name in COMPARED and suspect.stage == "rollout" and probe is not None:
        return [name, *(n for n in probe.fields if n in COMPARED and n != name)]
    if name and declared is not None and declared.kind != "meta":
        return [name]
    if suspect.code in SETTINGS and suspect.stage in STAGES:
        stage = STAGES[suspect.stage]
        return [name, *(n for n in (*stage.adds, *stage.may_add) if n in LOG_PROBS)]
    return [name] if name else []


def blamed(step: Replayed, compared: Sequence[Compared]) -> Blame:
    """All suspects of a step, sorted into faults and what they explain."""
    blame = Blame(step, compared)
    for suspect in suspects(step, compared):
        blame.take(suspect)
    blame.faults.sort(key=lambda fault: min(one.place for one in fault.all))
    return blame
