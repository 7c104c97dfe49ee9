"""Due probes: verdicts without a look, one scan for all, and faults that stay where they are."""

from collections.abc import Iterable
from typing import Any

import torch

from dataproto_audit.batch import BatchView
from dataproto_audit.findings import Finding
from dataproto_audit.probes.context import Context, Settings
from dataproto_audit.probes.registry import Probe
from dataproto_audit.probes.runner import Ran, due_probes, run_probes
from dataproto_audit.probes.scan import any_of, sum_of

VIEW = BatchView.of({"batch": {"a": torch.ones(3, 2), "b": torch.zeros(3, 2)}})
SUM = sum_of("sum", ("a",), lambda block: block["a"].sum())
BROKEN = any_of("broken", ("a",), lambda block: 1 / 0)


def context(**options: Any) -> Context:
    return Context(options.pop("step", 1), "reward", "after", Settings(), **options)


def passes(view: BatchView, stats: Any, ctx: Context) -> Iterable[Finding]:
    return []


def fails(view: BatchView, stats: Any, ctx: Context) -> Iterable[Finding]:
    yield ctx.fail("a", actual=f"sum {stats['sum']:g}")


def probe(name: str, run: Any = passes, **options: Any) -> Probe:
    return Probe(name, "DPA407", run, ("reward",), **options)


def ran(*probes: Probe, ctx: Context | None = None) -> list[Ran]:
    ctx = ctx or context()
    return run_probes(due_probes(probes, VIEW, ctx.broken), VIEW, ctx)


def test_every_due_probe_has_one_outcome_in_order() -> None:
    done = ran(probe("one"), probe("two", fails, stats=(SUM,)), probe("three", needs=("c",)))
    assert [(r.probe.name, r.kind) for r in done] == [
        ("one", "passed"), ("two", "failed"), ("three", "not_checkable"),
    ]  # fmt: skip
    [finding] = done[1].findings
    assert (finding.check, finding.code, finding.actual) == ("two", "DPA407", "sum 6")
    assert done[2].reason == "field not in the batch: c"


def test_reasons_in_the_order_in_which_they_are_sought() -> None:
    rare = probe("rare", every=2, needs=("c",))
    none = probe("none", applies=lambda ctx: "no such thing", needs=("c",))
    setting = probe("setting", needs=("a", "settings.n"))
    history = probe("history", needs=("history.x",))
    done = ran(rare, none, setting, history, ctx=context(step=2))
    assert [(r.kind, r.reason) for r in done] == [
        ("not_applicable", "runs every 2 steps"),
        ("not_applicable", "no such thing"),
        ("not_checkable", "setting unknown: n"),
        ("not_checkable", "no earlier steps of x"),
    ]


def test_a_probe_may_leave_without_a_verdict() -> None:
    def skips(view: BatchView, stats: Any, ctx: Context) -> Iterable[Finding]:
        yield from ()
        ctx.skip("images")

    def unknown(view: BatchView, stats: Any, ctx: Context) -> Iterable[Finding]:
        return iter(ctx.unknown("nobody knows"))

    done = ran(probe("skips", skips), probe("unknown", unknown))
    assert [(r.kind, r.reason, r.error) for r in done] == [
        ("not_applicable", "images", None), ("not_checkable", "nobody knows", None),
    ]  # fmt: skip


def test_an_error_stays_with_its_probe() -> None:
    def raises(view: BatchView, stats: Any, ctx: Context) -> Iterable[Finding]:
        raise KeyError("lost")

    def wrong(ctx: Context) -> str:
        raise ValueError("in applies")

    done = ran(probe("raises", raises), probe("applies", applies=wrong), probe("fine"))
    assert isinstance(done[0].error, KeyError)
    assert isinstance(done[1].error, ValueError)
    assert (done[2].kind, done[2].error) == ("passed", None)


def test_a_broken_statistic_takes_only_its_own_probe_along() -> None:
    done = ran(probe("bad", stats=(BROKEN,)), probe("good", fails, stats=(SUM,)))
    assert isinstance(done[0].error, ZeroDivisionError)
    assert (done[1].kind, done[1].error) == ("failed", None)


def test_a_batch_without_a_field_may_have_no_such_thing() -> None:
    """Asked only where a field is missing; where it has no reason, that is the verdict."""
    some = probe("some", needs=("c",), absent=lambda view, ctx: "nothing of the kind")
    none = probe("none", needs=("c",), absent=lambda view, ctx: "")
    there = probe("there", needs=("a",), absent=lambda view, ctx: "nothing of the kind")
    assert [(r.kind, r.reason) for r in ran(some, none, there)] == [
        ("not_applicable", "nothing of the kind"),
        ("not_checkable", "field not in the batch: c"),
        ("passed", ""),
    ]
