"""Reduce a failing recording to a minimal one that still fails in the same way.

::

    shrunk = shrink(recording, code="DPA302")            # stage=..., good=a healthy recording
    shrunk.recording, shrunk.finding, shrunk.calls

The same way means: a finding with the same code, stage and field. A cut is only taken where the
healthy recording, cut alike, stays as quiet as it was, so that what is left shows the fault and not
the cut. The healthy one is given, or made by mending the field that the finding names
(:mod:`.mended`); without either the finding alone decides. The answer is 1-minimal over boundaries,
rows, columns, fields, settings and notes: without any single one of them the finding is gone, or
the healthy recording alarms.

Not covered: findings that several steps make together keep the steps that they need, but values of
metrics are not made smaller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dataproto_audit.codes import UsageError
from dataproto_audit.findings import SEVERITIES, Finding
from dataproto_audit.replay.cut import Cut, Whole, sizes
from dataproto_audit.replay.ddmin import ddmin
from dataproto_audit.replay.mended import mended
from dataproto_audit.replay.predicates import asked
from dataproto_audit.replay.recording import (
    Recording,
    Sighting,
    Target,
    audit,
    find,
    loud,
    names_of,
    no_such,
    target_of,
)

Predicate = Callable[[Recording], bool]
LAYOUT = ("n", "world_size", "tp_size", "cp_size", "sp_size", "micro_batch_size",
          "actor_micro_batch_size", "max_token_len", "ppo_epochs")  # fmt: skip
MAX_CALLS = 5000
"""Predicate calls after which the smallest recording so far is the answer."""


@dataclass(frozen=True)
class Shrunk:
    """A minimal recording. ``finding`` is what it still shows, None where a predicate decides;
    ``calls`` counts recordings that were judged, healthy ones not counted."""

    recording: Recording
    cut: Cut
    finding: Finding | None
    calls: int
    cpu_s: float
    before: dict[str, int]
    sizes: dict[str, int]
    """Rows, groups and attended tokens that are left, those of fields that were dropped, too."""
    twin: str
    minimal: bool = True


def shrink(
    recording: Recording,
    *,
    code: str | None = None,
    stage: str | None = None,
    good: Recording | None = None,
    predicate: Predicate | None = None,
) -> Shrunk:
    """Shrink ``recording`` around the finding with ``code``, or around what ``predicate`` says.

    ``good`` is a healthy recording of the same form. Without a code the first loud finding counts.
    Raises :class:`UsageError` (``DPA851``) where there is no such finding, or the predicate is not
    true to begin with.
    """
    start = time.process_time()
    if predicate is not None:
        judge = Judge(recording, good=good, predicate=predicate)
    else:
        judge = Judge.of_finding(recording, code, stage, good)
    cut = Search(judge).run()
    made = judge.whole.cut(cut)
    finding = None
    if judge.target is not None:
        finding = next(s.finding for s in audit(made) if s.target == judge.target)
    return Shrunk(
        made, cut, finding, judge.calls, time.process_time() - start, sizes(judge.whole.recording),
        sizes(judge.whole.cut(replace(cut, dropped=frozenset()))), judge.twin_from,
        judge.calls < MAX_CALLS,
    )  # fmt: skip


class Judge:
    """Says of a cut whether it still fails in the same way, and counts how often it was asked."""

    def __init__(
        self,
        recording: Recording,
        *,
        good: Recording | None = None,
        predicate: Predicate | None = None,
        sighting: Sighting | None = None,
        twin_from: str = "given",
    ) -> None:
        self.whole, self.predicate, self.sighting = Whole(recording), predicate, sighting
        self.target: Target | None = sighting.target if sighting else None
        self.calls = 0
        self._known: dict[Cut, bool] = {}
        self.twin: Whole | None = None
        self.twin_from = "none"
        if good is not None:
            twin = Whole(good)
            alike = len(twin.views) == len(self.whole.views) and twin.widths == self.whole.widths
            self.twin, self.twin_from = (twin, twin_from) if alike else (None, "none")
        everything = self.whole.everything
        self._quiet = self._alarms(self.twin.everything) if self.twin else frozenset()
        if self.twin is not None and self.target in self._quiet:
            self.twin, self.twin_from = None, "none"
        if not self.holds(everything):
            raise UsageError(
                "DPA851", "the predicate is not true of the whole batch, so nothing can be shrunk.",
                "Give a predicate that is true of it, or --code.",
            )  # fmt: skip

    @classmethod
    def of_finding(
        cls, recording: Recording, code: str | None, stage: str | None, good: Recording | None
    ) -> Judge:
        """A judge who looks for the finding with ``code``, or the first loud one."""
        for partial in (True, False):
            tried = replace(recording, partial=partial)
            found = audit(tried)
            sighting = find(found, code, stage)
            if sighting is not None:
                break
        else:
            raise no_such(names_of(found), code, stage, of="the batch")
        twin_from = "given"
        if good is None:
            good, twin_from = mended(tried, sighting), "mended"
        else:
            good = replace(good, partial=tried.partial)
        return cls(tried, good=good, sighting=sighting, twin_from=twin_from)

    def holds(self, cut: Cut) -> bool:
        """True where the cut still fails in the same way and its healthy twin stays quiet."""
        if cut not in self._known:
            if self.calls >= MAX_CALLS:
                return False
            self.calls += 1
            self._known[cut] = self._fails(cut) and (
                self.twin is None or self._alarms(self._alike(cut)) <= self._quiet
            )
        return self._known[cut]

    def _alike(self, cut: Cut) -> Cut:
        """The same cut of the healthy recording, where prompts may have other numbers of rows."""
        assert self.twin is not None
        ours, theirs = self.whole.followed.group_of, self.twin.followed.group_of
        if ours == theirs:
            return cut
        groups = {ours[sample] for sample in cut.samples}
        kept = [
            sample for sample, group in theirs.items()
            if group in groups and (sample in cut.samples or ours.get(sample) != group)
        ]  # fmt: skip
        return replace(cut, samples=frozenset(kept))

    def _fails(self, cut: Cut) -> bool:
        if not cut.pieces:
            return False
        made = self.whole.cut(cut)
        if self.predicate is not None:
            return self._asked(self.predicate, made)
        assert self.sighting is not None
        worst = SEVERITIES.index(self.sighting.finding.severity)
        return any(
            one.target == self.target and SEVERITIES.index(one.finding.severity) <= worst
            for one in audit(made)
        )

    def _asked(self, predicate: Predicate, made: Recording) -> bool:
        """What the predicate says; an error of it is a no, except of the whole batch."""
        return asked(predicate, made, whole=self.calls <= 1)

    def _alarms(self, cut: Cut) -> frozenset[Target]:
        assert self.twin is not None
        if self.predicate is not None:
            told = self._asked(self.predicate, self.twin.cut(cut))
            return frozenset([("predicate", "", "")] if told else [])
        return frozenset(one.target for one in loud(audit(self.twin.cut(cut))))


class Search:
    """Where the judge is asked: coarse things first, then single ones, until nothing changes."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.whole = judge.whole

    def run(self) -> Cut:
        """The minimal cut."""
        cut = self._hinted(self._beside(self._boundaries(self.whole.everything)))
        while True:
            before = cut
            for step in (self._groups, self._samples, self._fewer, self._ranks, self._response,
                         self._prompt, self._boundaries, self._fields):  # fmt: skip
                cut = step(cut)
            if cut == before:
                return cut

    def _try(self, cut: Cut, **changed: Any) -> Cut:
        """``cut`` with these changes, where that still fails; else as it was."""
        tried = replace(cut, **changed)
        return tried if self.judge.holds(tried) else cut

    def _boundaries(self, cut: Cut) -> Cut:
        """The boundary of the finding, with as few before it as are needed."""
        sighting = self.judge.sighting
        if sighting is not None and len(cut.pieces) == len(self.whole.views) > 1:
            last = sighting.piece + 1
            for first in (last - 1, last - 2, last - 4, 0):
                tried = self._try(cut, pieces=tuple(range(max(0, first), last)))
                if tried is not cut:
                    cut = tried
                    break
        holds = self.judge.holds
        kept = ddmin(cut.pieces, lambda left: holds(replace(cut, pieces=tuple(left))), least=1)
        return replace(cut, pieces=tuple(kept))

    def _drop(self, cut: Cut, names: Sequence[str]) -> Cut:
        there = [name for name in names if name not in cut.dropped]

        def without(kept: Sequence[str]) -> Cut:
            return replace(cut, dropped=cut.dropped | (set(there) - set(kept)))

        if not there:
            return cut
        if self.judge.holds(without([])):
            return without([])
        return without(ddmin(there, lambda left: self.judge.holds(without(left))))

    def _beside(self, cut: Cut) -> Cut:
        """Without what a smaller batch could contradict and the finding does not need.

        Settings that say how exact a comparison is stay for now: without them it takes more cells
        to tell a difference.
        """
        layout = {f"setting.{name}" for name in LAYOUT}
        return self._drop(cut, [
            name for name in self.whole.names()
            if name in layout or name.partition(".")[0] in ("evidence", "metric", "meta")
        ])  # fmt: skip

    def _fields(self, cut: Cut) -> Cut:
        return self._drop(cut, self.whole.names())

    def _hinted(self, cut: Cut) -> Cut:
        """The rows that the finding names, alone or with their groups."""
        sighting = self.judge.sighting
        if sighting is None or not sighting.finding.rows:
            return cut
        own = self.whole.followed.samples[sighting.piece]
        if own is None:
            return cut
        followed = self.whole.followed
        named = [int(own[row]) for row in sighting.finding.rows[:64] if row < len(own)]
        groups = [followed.groups[followed.group_of[sample]] for sample in named]
        several = frozenset(s for group in groups for s in group)
        options = [frozenset(named[:1]), frozenset(groups[0] if groups else ()), frozenset(named),
                   several]  # fmt: skip
        for samples in options:
            if samples and samples < cut.samples:
                tried = self._try(cut, samples=samples)
                if tried is not cut:
                    return tried
        return cut

    def _groups(self, cut: Cut) -> Cut:
        groups = [
            kept for group in self.whole.followed.groups.values()
            if (kept := tuple(s for s in group if s in cut.samples))
        ]  # fmt: skip
        if len(groups) < 2:
            return cut
        left = ddmin(groups, lambda some: self.judge.holds(
            replace(cut, samples=frozenset(s for group in some for s in group))))  # fmt: skip
        return replace(cut, samples=frozenset(s for group in left for s in group))

    def _samples(self, cut: Cut) -> Cut:
        left = ddmin(sorted(cut.samples), lambda some: self.judge.holds(
            replace(cut, samples=frozenset(some))))  # fmt: skip
        return replace(cut, samples=frozenset(left))

    def _fewer(self, cut: Cut) -> Cut:
        """Fewer rows of each prompt, where the finding needs n."""
        n = dict(cut.changed).get("n", self.whole.recording.settings.n)
        if n is None or "setting.n" in cut.dropped or n < 2:
            return cut
        for fewer in range(1, n):
            samples = [s for group in self.whole.followed.groups.values()
                       for s in [s for s in group if s in cut.samples][:fewer]]  # fmt: skip
            tried = self._try(cut, samples=frozenset(samples), changed=(("n", fewer),))
            if tried is not cut:
                return tried
        return cut

    def _ranks(self, cut: Cut) -> Cut:
        """Rows of all ranks at once, where the finding needs what the ranks noted."""
        for number in cut.pieces:
            notes = self.whole.recording.pieces[number].evidence.get("ranks")
            own = self.whole.followed.samples[number]
            if isinstance(notes, (list, tuple)) and notes and own is not None:
                kept = [sample for sample in own.tolist() if sample in cut.samples]
                cut = self._turns(cut, kept, len(notes))
        return cut

    def _turns(self, cut: Cut, kept: Sequence[int], ranks: int) -> Cut:
        if "evidence.ranks" in cut.dropped or not kept:
            return cut
        size = -(-len(kept) // ranks)
        chunks = [kept[start : start + size] for start in range(0, len(kept), size)]
        turns = [tuple(c[at] for c in chunks if at < len(c)) for at in range(size)]
        others = cut.samples - set(kept)
        left = ddmin(turns, lambda some: self.judge.holds(
            replace(cut, samples=others.union(*some))), least=1)  # fmt: skip
        return replace(cut, samples=others.union(*left))

    def _response(self, cut: Cut) -> Cut:
        kept = ddmin(cut.response, lambda left: self.judge.holds(
            replace(cut, response=tuple(left))), least=min(1, len(cut.response)))  # fmt: skip
        return replace(cut, response=tuple(kept))

    def _prompt(self, cut: Cut) -> Cut:
        kept = ddmin(cut.prompt, lambda left: self.judge.holds(
            replace(cut, prompt=tuple(left))), least=min(1, len(cut.prompt)))  # fmt: skip
        return replace(cut, prompt=tuple(kept))


__all__ = ["Judge", "Shrunk", "shrink", "target_of"]
