"""The trail of a step: each boundary compared with the one before it.

The trail holds two states: that of the last boundary of the step's batch, and that of the prompts
before the repeat. Batches of their own (weight sync, validation) leave it as it is.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dataproto_audit.batch import BatchView
from dataproto_audit.contracts.check import Violation
from dataproto_audit.contracts.relations import compare_expanded, compare_rows, compare_unchanged
from dataproto_audit.contracts.rows import RowState
from dataproto_audit.contracts.stages import Stage
from dataproto_audit.reasons import SettingUnknown

FOLLOWED = ("same", "expand", "permute")
"""Row relations that are compared; of others only the fields are checked."""
OWN_BATCH = "a batch of its own"
"""Reason that nothing is compared: that is how it should be."""
CONSUMED = ("entropys",)
"""Fields that the driver turns into a metric and drops between two stages."""

LASTING = ("temperature", "global_steps")
"""Meta entries that hold for the whole step once the batch carries them."""


@dataclass
class Crossing:
    """What a boundary did to the rows. With a ``reason`` nothing was compared."""

    state: RowState
    previous: RowState | None
    check: Literal["rows", "unchanged"]
    code: str
    violations: Sequence[Violation] = ()
    reason: str = ""

    @property
    def kind(self) -> Literal["not_checkable", "not_applicable"]:
        """The outcome that goes with the reason."""
        return "not_applicable" if self.reason == OWN_BATCH else "not_checkable"

    @property
    def changed(self) -> frozenset[str]:
        """Fields that were there before and do not hold the same rows now."""
        if self.previous is None:
            return frozenset()
        return frozenset(
            name
            for name in self.state.view.names
            if name not in self.state.same and name in self.previous.view
        )


class Trail:
    """Follows the batch through a step. ``settings`` has ``n`` and the flags of the stages."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.state: RowState | None = None
        self.origin: RowState | None = None
        self._meta: dict[str, Any] = {}
        self.begun = False
        """True once a batch has left a stage: what it carries has been looked at."""

    def lose(self) -> None:
        """Forget where the batch was: nothing can be compared at the next boundary."""
        self.state, self.begun = None, True

    def cross(self, stage: type[Stage], view: BatchView, when: str) -> Crossing:
        """Compare ``view`` with the boundary before, and remember it."""
        previous = None if stage.own_input else self.state
        if previous is not None and previous.untouched(view):
            state = previous.again()
        else:
            state = RowState(view, previous)
        compare = self._entered if when == "before" else self._left
        crossing = compare(stage, previous, state)
        sides = stage.name == "union" and when == "before"  # of a merge: each has meta of its own
        if previous is not None and view.meta and not (stage.fresh or sides or crossing.reason):
            lost = _meta_lost(stage.name, self._meta, view.meta, when)
            crossing.violations = [*crossing.violations, *lost]
        if not stage.own_input or stage.name == "prompts":
            self._meta = {name: view.meta[name] for name in LASTING if name in view.meta}
        begins = stage.name == "prompts" and when == "after"
        if begins or not stage.own_input:
            self.state = state
        if begins:
            self.origin = state
        self.begun = self.begun or when == "after"
        return crossing

    def keys(self, state: RowState) -> tuple[str, ...]:
        """Row keys; until the batch carries uids they follow from the prompts and the repeat."""
        return self.later(state)()

    def later(self, state: RowState) -> Callable[[], tuple[str, ...]]:
        """What gives the row keys later, without keeping the batch."""
        return state.key_maker(self.origin.objects.get("uid", ()) if self.origin else ())

    def _entered(self, stage: type[Stage], previous: RowState | None, state: RowState) -> Crossing:
        seen = Crossing(state, previous, "unchanged", "DPA113")
        if stage.own_input:
            return _not_compared(seen, OWN_BATCH)
        if previous is None:
            return _not_compared(seen, "the boundary before was not seen")
        if stage.rows.relation == "expand" and state.rows != previous.rows:
            n = self.settings.n
            if n is None:
                return _not_compared(seen, SettingUnknown.of("n"))
            if state.rows == previous.rows * n:
                seen.violations = compare_expanded(previous, state, n)
                return seen
        may_drop: Collection[str] | None = None if stage.fresh else CONSUMED
        place = f"what happens before {stage.name}"
        found = compare_unchanged(place, previous, state, may_drop=may_drop)
        seen.violations = [replace(v, code="DPA113", causes=_between(v.causes)) for v in found]
        return seen

    def _left(self, stage: type[Stage], previous: RowState | None, state: RowState) -> Crossing:
        seen = Crossing(state, previous, "rows", "DPA104")
        if stage.own_input:
            return _not_compared(seen, OWN_BATCH)
        expands = stage.rows.relation == "expand"
        base = self.origin if expands and self.origin is not None else previous
        if base is None:
            return _not_compared(seen, "the boundary before was not seen")
        if expands and self.settings.n is None:
            return _not_compared(seen, SettingUnknown.of("n"))
        if stage.rows.relation not in FOLLOWED:
            return _not_compared(seen, f"rows that {stage.rows.relation} are not followed")
        sizes = {"n": self.settings.n or 1, **self.settings.factors()}
        free = stage.changeable(self.settings)
        free |= {name for name in stage.unsettled(self.settings) if _cut(base, state, name)}
        found = compare_rows(stage, base, state, sizes=sizes, free=free)
        if stage.name == "union" and self.origin is not None and self.settings.n:
            found += compare_expanded(self.origin, state, self.settings.n)
        seen.violations = found
        return seen


def _between(causes: tuple[str, ...]) -> tuple[str, ...]:
    """``changed_between_stages`` before what is only supposed, behind what the rows show."""
    supposed = causes[:1] in ((), ("field_overwritten",), ("field_forgotten",))
    return ("changed_between_stages", *causes) if supposed else (*causes, "changed_between_stages")


def _meta_lost(
    place: str, before: Mapping[str, Any], after: Mapping[str, Any], when: str
) -> Iterator[Violation]:
    """Meta entries of the whole run that were there at the boundary before."""
    code, kept = ("DPA107", f"kept by {place}")
    if when == "before":
        code, kept = "DPA113", f"kept by what happens before {place}"
    for name in before:
        if name not in after:
            evidence = {"it was": str(before[name])}
            causes = ("meta_lost", "field_forgotten")
            yield Violation(code, f"meta_info.{name}", kept, "gone", evidence, causes)


def _cut(before: RowState, after: RowState, name: str) -> bool:
    """True for a mask that only lost tokens, which is what a rejection does to it."""
    if name in after.same or not (name in before.view.tensors and name in after.view.tensors):
        return False
    old, new = before.view.numpy(name), after.view.numpy(name)
    return old.shape == new.shape and not ((new != 0) & (old == 0)).any()


def _not_compared(seen: Crossing, reason: str) -> Crossing:
    seen.reason = reason
    return seen
