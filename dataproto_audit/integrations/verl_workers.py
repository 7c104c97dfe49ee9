"""Hooks inside verl's workers: what each rank does in a stage, told to the driver by files.

Installed in every process that loads the plugin with option ``workers``; a process that never
imports verl's actors or engines does nothing more. The driver opens a stage
(:mod:`.rank_evidence`); only calls made while it is open are recorded, so that validation, steps
that are left out and critics cost nothing. What is told has the names that this package's own
trainer uses, and the same probes judge it (DPA501-503, DPA505-506, DPA701-706).

Tensors are read after verl has made them and are copied to the CPU, which on an accelerator waits
for them. Nothing is written, reordered or kept; errors are logged once and end the hooks of the
process.

Not covered: critics but the engine's over FSDP; log-probs and losses of Megatron, and anything else
of it that its stand-in in the tests has not (no run on a CPU is possible).
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from dataproto_audit.integrations.on_import import OnImport
from dataproto_audit.integrations.options import Options
from dataproto_audit.integrations.patches import Args, Around, Kwargs, Patches
from dataproto_audit.integrations.preserved import preserved_rng
from dataproto_audit.integrations.worker_files import Exchange, exchange_for
from dataproto_audit.integrations.worker_record import Place, Record

log = logging.getLogger("dataproto_audit")


class Workers:
    """The hooks of this process and the call that is being recorded."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.record: Record | None = None
        self.off = False
        self.cpu_s, self._depth = 0.0, 0
        """What the hooks of this process took since it began."""
        self.calls = Patches()
        """Hooks that last for one call only."""
        self.handles: list[Any] = []
        """Hooks in models, which last as long; each has a ``remove``."""
        self._patches = Patches()
        self._waiting: list[OnImport] = []
        self._exchange: Exchange | None = None

    def install(self) -> None:
        """Hook into each implementation as soon as this process imports it."""
        from dataproto_audit.integrations import (
            verl_workers_engine,
            verl_workers_legacy,
            verl_workers_megatron,
        )

        for kind in (verl_workers_legacy, verl_workers_engine, verl_workers_megatron):
            for module, hook in kind.HOOKS.items():
                waiting = OnImport(module, self._then(module, hook))
                self._waiting.append(waiting)
                waiting.install()

    def _then(self, name: str, hook: Callable[[Workers, Any], None]) -> Any:
        def arrived(module: ModuleType) -> None:
            self.guarded(f"hooks of {name}", lambda: hook(self, module))

        return arrived

    def detach(self) -> None:
        """Restore every original."""
        for waiting in self._waiting:
            waiting.remove()
        self.broken_off()
        self._patches.undo()

    def wrap(self, owner: Any, name: str, around: Around) -> None:
        """Hook into ``owner.name`` where it exists."""
        if owner is not None:
            self._patches.wrap(owner, name, around)

    def guarded(self, name: str, work: Callable[[], None]) -> None:
        """Run a part of ours; an error ends the hooks of this process and is logged once."""
        if self.off:
            return
        start, self._depth = time.thread_time(), self._depth + 1
        try:
            with preserved_rng():
                work()
        except Exception as error:  # fail-open by design
            self.off = True
            self.broken_off()
            log.error(
                "DPA904 %s failed inside dataproto-audit; the workers go on without it.",
                name, exc_info=error,
            )  # fmt: skip
        finally:
            self._depth -= 1
            if not self._depth:
                self.cpu_s += time.thread_time() - start

    def begin(
        self, stage: str, place: Place, rows: tuple[list[bytes], list[int]],
        token_limit: int | None = None,
    ) -> None:  # fmt: skip
        """A call of ``stage`` begins on these rows; recorded where the driver has asked for it."""
        if self._exchange is None:
            self._exchange = exchange_for(self.options)
        asked = self._exchange.asked()
        self.record = None
        if asked is not None and asked.stage == stage:
            keys, lengths = rows
            self.record = Record(asked, place, self._exchange, keys=keys, lengths=lengths,
                                 token_limit=token_limit)  # fmt: skip

    def end(self) -> None:
        """The call returned."""
        record = self.record
        self.broken_off()
        if record is not None:
            record.about["hooks_cpu_s"] = self.cpu_s
            record.about["process"] = f"{socket.gethostname()}:{os.getpid()}"
            record.finish()

    def broken_off(self) -> None:
        """The call raised: its notes stay, it has no answer."""
        self.record = None
        self.calls.undo()
        while self.handles:
            self.handles.pop().remove()


class Hook:
    """Around one function of verl; ``before`` and ``after`` may be left out.

    They get the call's arguments by position and name, ``after`` also what was returned. Hooks
    that do not begin a call (``begins``) are passed by while nothing is recorded.
    """

    def __init__(
        self,
        workers: Workers,
        name: str,
        *,
        before: Callable[[Args, Kwargs], None] | None = None,
        after: Callable[[Args, Kwargs, Any], None] | None = None,
        begins: bool = False,
        ends: bool = False,
    ) -> None:
        self.workers, self.name = workers, name
        self._before, self._after = before, after
        self._begins, self._ends = begins, ends

    def on(self) -> bool:
        """True while there is something to see."""
        return not self.workers.off and (self._begins or self.workers.record is not None)

    def before(self, args: Args, kwargs: Kwargs) -> None:
        """The call is about to be made."""
        before = self._before
        if before is not None:
            self.workers.guarded(self.name, lambda: before(args, kwargs))

    def after(self, args: Args, kwargs: Kwargs, result: Any) -> Any:
        """The call returned; its result goes on as it is."""
        after = self._after
        if after is not None and self.workers.record is not None:
            self.workers.guarded(self.name, lambda: after(args, kwargs, result))
        if self._ends:
            self.workers.guarded(self.name, self.workers.end)
        return result

    def raised(self, args: Args, kwargs: Kwargs, error: BaseException) -> None:
        """The call raised, which ends what is recorded."""
        if self._begins or self._ends:
            self.workers.broken_off()


def argument(args: Args, kwargs: Kwargs, name: str, at: int, default: Any = None) -> Any:
    """An argument by its name or its position (0 is ``self``)."""
    return kwargs[name] if name in kwargs else args[at] if len(args) > at else default


def restarts_of(positions: Any, lengths: list[int]) -> list[bool]:
    """Whether positions i64[..., 1, tokens] begin at 0 with each row of a packed input."""
    line = positions.detach().cpu().reshape(-1, positions.shape[-1])[0].tolist()
    found, start = [], 0
    for length in lengths:
        found.append(not length or (start < len(line) and line[start] == 0))
        start += length
    return found


def mask_of(mask: Any) -> str:
    """``none``, ``all ones`` or ``given``."""
    if mask is None:
        return "none"
    whole = hasattr(mask, "ndim") and mask.ndim == 2 and bool((mask != 0).all())
    return "all ones" if whole else "given"


ALONE = ("sdpa", "eager")
"""Attention kernels that verl's patch for Ulysses leaves as they are: it is one of flash attention
(``models/transformers/monkey_patch.py``), so each rank attends within its own slice."""


def stays_alone(model: Any) -> bool:
    """True where attention of a transformers model, wrapped or not, looks at no other rank's part
    of a row; False, too, for a kernel that is not known, or that somebody has replaced."""
    config = getattr(getattr(model, "module", model), "config", None)
    kernel = getattr(config, "_attn_implementation", None)
    models = sys.modules.get("transformers.modeling_utils")
    registered = getattr(models, "ALL_ATTENTION_FUNCTIONS", None)
    function = registered.get(kernel) if isinstance(registered, Mapping) else None
    theirs = function is None or str(function.__module__).startswith("transformers.")
    return kernel in ALONE and theirs


def seen_alone(lengths: Sequence[int], splits: int) -> list[int]:
    """Tokens of each packed row in the slice that holds most of it, of ``splits`` equal ones.

    >>> seen_alone([4, 4, 4], 2)
    [4, 2, 4]
    """
    size = -(-sum(lengths) // splits)
    found, start = [], 0
    for length in lengths:
        end = start + length
        parts = [min(end, (n + 1) * size) - max(start, n * size) for n in range(splits)]
        found.append(max(0, *parts))
        start = end
    return found
