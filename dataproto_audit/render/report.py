"""What the tables of a run say, on one screen: ``dataproto-audit report RUN``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dataproto_audit.codes import CODES
from dataproto_audit.contracts.stages import STAGES
from dataproto_audit.dump.layout import MEAN_OVER
from dataproto_audit.dump.run import Run
from dataproto_audit.findings import OUTCOME_KINDS, SEVERITIES
from dataproto_audit.render.summary import SEVERITY_STYLE, render_finding
from dataproto_audit.render.text import REWARD_METRICS, number, sparkline, visible

if TYPE_CHECKING:
    import pandas as pd

TIMING_PREFIX = "timing_s/"
SHOWN_FINDINGS = 3
SHOWN_ROWS = 5
_GAPS = ("rollout_old_gap_max", "old_ref_gap_max")


def render_report(run: Run) -> RenderableType:
    """Sections that have something to show: outcomes, findings, reward, time, gaps, ranks.

    Reads and checks the tables, so it raises ``UsageError`` DPA803 for damaged ones.
    """
    parts: list[RenderableType] = [_head(run)]
    for section in (_reward, _outcomes, _findings, _slowest, _gaps, _ranks):
        parts += section(run)
    return Group(*parts)


def _head(run: Run) -> Text:
    text = Text("ok" if run.ok else "NOT OK", style="bold green" if run.ok else "bold red")
    text.append(f"  {visible(run.path)}  step {run.last_step}", style="default")
    for note in run.notes:
        text.append(f"  ({note})", style="yellow")
    return text


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _table(*names: str, left: int = 1) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for at, name in enumerate(names):
        table.add_column(name, justify="left" if at < left else "right", overflow="fold")
    return table


def _reward(run: Run) -> Iterable[RenderableType]:
    for name in REWARD_METRICS:
        curve = run.metric(name)
        if len(curve):
            values = [float(v) for v in curve]
            first, last = (
                sum(part) / len(part) for part in (values[:MEAN_OVER], values[-MEAN_OVER:])
            )
            steps = min(MEAN_OVER, len(values))
            over = f", means of {steps} steps" if steps > 1 else ""
            yield _title(f"Reward ({name}{over}): {number(first)} -> {number(last)}")
            yield Text(sparkline(values, width=60))
            return


def _outcomes(run: Run) -> Iterable[RenderableType]:
    outcomes = run.table("outcomes")
    if not len(outcomes):
        return
    counted = outcomes.groupby(["stage", "kind"], sort=False).size().unstack(fill_value=0)
    table = _table("stage", *OUTCOME_KINDS)
    order = {stage: at for at, stage in enumerate(STAGES)}  # the first sync comes before step 1
    stages = sorted(counted.index, key=lambda stage: order.get(stage, len(order)))
    for stage, row in counted.loc[stages].iterrows():
        table.add_row(Text(visible(stage)), *(str(row.get(kind, 0)) for kind in OUTCOME_KINDS))
    total = outcomes["kind"].value_counts()
    table.add_row("all", *(str(total.get(kind, 0)) for kind in OUTCOME_KINDS), style="bold")
    yield _title("Outcomes by stage")
    yield table
    missing = outcomes[outcomes["kind"] == "not_checkable"]
    for reason, many in missing["reason"].value_counts().head(SHOWN_ROWS).items():
        yield Text(f"  not checkable {many} times: {visible(reason)}", style="dim")


def _findings(run: Run) -> Iterable[RenderableType]:
    findings = run.table("findings")
    if not len(findings):
        yield _title("Findings: none")
        return
    yield _title(f"Findings: {len(findings)}")
    table = _table("code", "severity", "stage", "meaning", "count", "first step", left=4)
    rank = findings["severity"].map({severity: at for at, severity in enumerate(SEVERITIES)})
    worst_first = findings.assign(rank=rank).sort_values(["rank", "step"], kind="stable")
    for key, same in worst_first.groupby(["code", "severity", "stage"], sort=False):
        code, severity, stage = map(str, key)
        meaning = CODES[code].title if code in CODES else ""
        style = SEVERITY_STYLE.get(severity, "")
        cells = [Text(visible(cell)) for cell in (code, severity, stage, meaning)]
        table.add_row(*cells, str(len(same)), str(same["step"].min()), style=style)
    yield table
    first = worst_first.drop_duplicates(["code", "stage"]).head(SHOWN_FINDINGS)
    for record in first.to_dict("records"):
        yield render_finding({str(key): value for key, value in record.items()})


def _slowest(run: Run) -> Iterable[RenderableType]:
    steps = run.table("steps")
    timing = steps[steps["metric"].str.startswith(TIMING_PREFIX)]
    # `timing_s/step` is the whole step in verl; counting it beside its parts would halve them.
    timing = timing[timing["metric"] != f"{TIMING_PREFIX}step"]
    if not len(timing):
        return
    stages = timing.groupby("metric")["value"].agg(["sum", "mean", "max"])
    total = stages["sum"].sum() or 1.0
    table = _table("stage", "seconds", "share", "mean", "slowest step")
    for name, row in stages.nlargest(SHOWN_ROWS, "sum").iterrows():
        stage = Text(visible(str(name).removeprefix(TIMING_PREFIX)))
        share = f"{100 * row['sum'] / total:.0f} %"
        each = (f"{row['sum']:.1f}", share, f"{row['mean']:.3f}", f"{row['max']:.3f}")
        table.add_row(stage, *each)
    yield _title("Slowest stages")
    yield table


def _gaps(run: Run) -> Iterable[RenderableType]:
    rows = run.table("rows")
    for column in _GAPS:
        worst = rows[rows[column].notna()].nlargest(SHOWN_ROWS, column)
        worst = worst[worst[column] > 0]
        if not len(worst):
            continue
        table = _table("step", "row", "row key", "gap (nats)", "length", "score", left=3)
        for record in worst.to_dict("records"):
            place = (str(record["step"]), str(record["row"]), Text(_short(record["row_key"])))
            table.add_row(
                *place,
                number(record[column]),
                str(record["response_length"]),
                number(record["score"]),
            )
        yield _title(f"Largest {column}")
        yield table


def _ranks(run: Run) -> Iterable[RenderableType]:
    ranks = run.table("ranks")
    if not len(ranks):
        return
    by_step: pd.DataFrame = ranks.groupby(["stage", "step"], sort=False).agg(
        ranks=("rank", "nunique"),
        most=("tokens", "max"),
        mean=("tokens", "mean"),
        least=("micro_batches", "min"),
        largest=("micro_batches", "max"),
        bubble=("bubble", "mean"),
    )
    by_step["imbalance"] = by_step["most"] / by_step["mean"].where(by_step["mean"] > 0)
    by_step["unequal"] = by_step["least"] != by_step["largest"]
    stages: Any = by_step.groupby("stage", sort=False).agg(
        ranks=("ranks", "max"),
        mean=("imbalance", "mean"),
        worst=("imbalance", "max"),
        bubble=("bubble", "mean"),
        unequal=("unequal", "sum"),
    )
    table = _table("stage", "ranks", "max/mean tokens", "worst step", "bubble", "unequal steps")
    for stage, row in stages.iterrows():
        bubble = "-" if row["bubble"] != row["bubble"] else f"{100 * row['bubble']:.0f} %"
        numbers = (f"{row['ranks']:.0f}", number(float(row["mean"])), number(float(row["worst"])))
        table.add_row(Text(visible(stage)), *numbers, bubble, str(int(row["unequal"])))
    yield _title("Balance of ranks (1 is even; unequal: steps with unequal micro-batch counts)")
    yield table


def _short(key: str) -> str:
    clean = visible(key)
    return clean if len(clean) <= 24 else f"{clean[:12]}…{clean[-11:]}"
