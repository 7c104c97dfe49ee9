"""The answers of ``doctor`` as plain values, and as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dataproto_audit.codes import UsageError
from dataproto_audit.doctor.advice import advice
from dataproto_audit.doctor.arithmetic import lines, problems
from dataproto_audit.doctor.defects import defects_hit, defects_of
from dataproto_audit.doctor.environment import environment, installed
from dataproto_audit.doctor.keys import unknown
from dataproto_audit.doctor.planned import VERSIONS, is_ours, not_composed, planned
from dataproto_audit.doctor.problems import Problem
from dataproto_audit.doctor.values import impossible


def examine_environment() -> dict[str, Any]:
    """Versions, trainer kind, attach status, parts, and the known defects of this verl.

    Keys: ``versions, trainer, attach, checkable, parts, defects[{number, text, found_by}], ok``.
    """
    found = environment()
    known = defects_of(str(found["versions"]["verl"]))
    listed = [{"number": d.number, "text": d.text, "found_by": d.found_by} for d in known]
    return found | {"defects": listed, "ok": not found["attach"]["wrong"]}


def examine(
    config: str, overrides: Sequence[str] = (), *, verl: str | None = None
) -> dict[str, Any]:
    """What a configuration would do: verl's, or one of this package's own loop.

    ``verl`` is the version that is to run it; None takes the installed one, else what the keys
    tell. Keys: ``config, for, arithmetic[], problems[], advice[], ok``; ``ok`` is False where a
    problem has level ``fail``. Raises :class:`UsageError` for what cannot be read.
    """
    if verl is not None and verl not in VERSIONS:
        raise UsageError(
            "DPA851", f"--verl {verl}: this version is not known.", f"Known: {', '.join(VERSIONS)}."
        )
    path = Path(config)
    if (path.suffix not in (".yaml", ".yml") and not path.exists()) or is_ours(path):
        return _own(config, overrides)
    here = installed("verl")
    chosen = verl or (here if here in VERSIONS else None)
    plan = planned(path, overrides, version=chosen)
    wrong = [*not_composed(plan), *unknown(plan, overrides), *impossible(plan), *problems(plan)]
    wrong += defects_hit(plan)
    trainer = "V1" if plan.v1 else f"V0, {'engine' if plan.engine else 'legacy'} workers"
    return {
        "config": config,
        "for": f"verl {plan.version} ({trainer})",
        "arithmetic": lines(plan),
        "problems": [problem.to_dict() for problem in wrong],
        "advice": [one.to_dict() for one in advice(plan)],
        "ok": not any(problem.level == "fail" for problem in wrong),
    }


def _own(config: str, overrides: Sequence[str]) -> dict[str, Any]:
    from dataproto_audit.trainer.config import load_config
    from dataproto_audit.trainer.sizes import world_size
    from dataproto_audit.trainer.validate import validate

    loaded = load_config(config, overrides)
    found: list[Problem] = []
    try:
        validate(loaded)
    except UsageError as error:
        found.append(Problem("fail", error.code, error.message, error.remedy))
    rows = loaded.data.train_batch_size * loaded.actor_rollout_ref.rollout.n
    return {
        "config": config,
        "for": "the loop of this package",
        "arithmetic": [f"ranks: {world_size(loaded)}", f"rows: {rows}"],
        "problems": [problem.to_dict() for problem in found],
        "advice": [],
        "ok": not found,
    }


def config_text(answer: dict[str, Any]) -> str:
    """What ``examine`` found, for a terminal."""
    said = [f"{answer['config']} for {answer['for']}", *(f"  {x}" for x in answer["arithmetic"])]
    said += [f"{Problem(**problem)}" for problem in answer["problems"]] or ["nothing found"]
    if answer["advice"]:
        said.append("To check more:")
        said += [f"  {a['setting']}: {a['text']} ({', '.join(a['codes'])})" for a in
                 answer["advice"]]  # fmt: skip
    return "\n".join(said)


def environment_text(answer: dict[str, Any]) -> str:
    """What ``examine_environment`` found, for a terminal."""
    said = [f"{name:14} {version or '-'}" for name, version in answer["versions"].items()]
    attach = answer["attach"]
    told = attach["DATAPROTO_AUDIT"]
    asked = {True: "1", False: "0", None: "not set"}.get(told, f"wrong: {told}")
    said += [
        f"trainer: {answer['trainer']}",
        f"can be checked: {answer['checkable']}",
        f"attached: {'yes' if attach['will_attach'] else 'no'} (VERL_USE_EXTERNAL_MODULES "
        f"{'names' if attach['VERL_USE_EXTERNAL_MODULES'] else 'does not name'} the plugin, "
        f"DATAPROTO_AUDIT {asked}, entry point "
        f"{'found' if attach['entry_point'] else 'not found'}, plugin "
        f"{'importable' if attach['plugin'] else 'not importable'})",
    ]
    said += [attach["wrong"] or attach["remedy"]] if attach["wrong"] or attach["remedy"] else []
    for part in answer["parts"]:
        lacks = f"missing {', '.join(part['missing'])}: {part['install']}"
        said.append(f"{part['part']}: {lacks if part['missing'] else 'ready'}")
    if answer["defects"]:
        said.append(f"Known defects of verl {answer['versions']['verl']} on the way of the data:")
    for defect in answer["defects"]:
        found = f"found by {defect['found_by']}" if defect["found_by"] else "nothing finds it"
        said.append(f"  {defect['number']:4} {defect['text']} ({found})")
    return "\n".join(said)
