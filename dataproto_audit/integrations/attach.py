"""``dataproto_audit.attach``: audit a trainer of verl without editing it.

::

    with dataproto_audit.attach(trainer, on_fail="record"):     # this trainer, for the block
        trainer.fit()

    attached = dataproto_audit.attach()                         # any trainer made from now on
    ...
    attached.detach()

By environment alone: ``VERL_USE_EXTERNAL_MODULES=dataproto_audit.verl_plugin``, see
:mod:`dataproto_audit.verl_plugin`.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from dataclasses import asdict
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from dataproto_audit.codes import UsageError
from dataproto_audit.integrations.on_import import OnImport
from dataproto_audit.integrations.options import Options, options
from dataproto_audit.integrations.patches import Args, Kwargs, Patches
from dataproto_audit.integrations.verl_versions import (
    MODULE,
    MODULE_V1,
    TRAINER,
    TRAINER_V1,
)

if TYPE_CHECKING:
    from dataproto_audit.integrations.verl_run import VerlRun
    from dataproto_audit.integrations.verl_workers import Workers

log = logging.getLogger("dataproto_audit")

NEEDED = ("fit", "_get_gen_batch", "_compute_old_log_prob", "_update_actor")
NEEDED_V1 = ("fit", "_step_once", "_compute_old_log_prob", "_update_actor")
"""Methods without which an object is no trainer that we know."""
CLASSES = {MODULE: TRAINER, MODULE_V1: TRAINER_V1}
_LIVE: list[Attachment] = []
"""Attachments with a trainer of theirs."""


class Attachment:
    """An audit that is attached; leaving the block, or :meth:`detach`, ends it.

    Of several attachments to one trainer the first one audits it, with its settings. The others
    show what it sees (:attr:`observed`); ending them ends nothing of the first one's.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.runs: list[VerlRun] = []
        self._others: list[VerlRun] = []
        """Runs of earlier attachments, of trainers that this one was to audit, too."""
        self._patches = Patches()
        self._hooks: list[OnImport] = []
        self._workers: Workers | None = None

    def detach(self) -> None:
        """Restore every original and close the tables. Doing it twice does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._patches.undo()
        if self._workers is not None:
            self._workers.detach()
        for run in self.runs:
            run.detach()
        if self in _LIVE:
            _LIVE.remove(self)

    @property
    def observed(self) -> Counter[str]:
        """Boundaries seen so far, by ``stage.before`` and ``stage.after``."""
        total: Counter[str] = Counter()
        for run in (*self.runs, *self._others):
            session = run.session or run.closed
            if session is not None:
                total.update(session.observed)
        return total

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()

    # -- for trainers that do not exist yet --------------------------------------------------------

    def wait(self) -> None:
        """Attach to every trainer, of V0 or V1, that is made from now on in this process."""
        self._hooks = [OnImport(name, self._imported) for name in CLASSES]
        for hook in self._hooks:
            hook.install()
        self._hook_workers()

    def _hook_workers(self) -> None:
        """Look into workers that run in this process, if that was asked for."""
        if self.options.workers and self.options.here() and self._workers is None:
            from dataproto_audit.integrations.verl_workers import Workers

            self._workers = Workers(self.options)
            self._workers.install()

    def _imported(self, module: ModuleType) -> None:
        trainer = getattr(module, CLASSES.get(module.__name__, TRAINER), None)
        if trainer is not None:
            self._patches.wrap(trainer, "__init__", _Made(self))

    def take(self, trainer: Any) -> None:
        """Attach to this trainer."""
        from dataproto_audit.integrations.verl_run import VerlRun
        from dataproto_audit.integrations.verl_v1_run import VerlV1Run

        self._hook_workers()
        kind = VerlV1Run if not _lacking(trainer, NEEDED_V1) else VerlRun
        run = kind(trainer, self.options)
        run.attach()
        self.runs.append(run)
        if self not in _LIVE:
            _LIVE.append(self)

    def join(self, run: VerlRun) -> None:
        """Look on at a run of an earlier attachment, and say which settings have no effect."""
        if run in (*self.runs, *self._others):  # constructors may call one another
            return
        self._others.append(run)
        mine, theirs = asdict(self.options), asdict(run.options)
        lost = ", ".join(f"{k}={v!r}" for k, v in mine.items() if v != theirs[k])
        log.warning(
            "This trainer is audited already: the first attachment and its settings stay until "
            "that one ends%s.", f"; without effect are {lost}" if lost else "",
        )  # fmt: skip


class _Made:
    """Around the constructor of the trainer class."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment

    def on(self) -> bool:
        return True

    def before(self, args: Args, kwargs: Kwargs) -> None:
        pass

    def after(self, args: Args, kwargs: Kwargs, result: Any) -> Any:
        mine = self._attachment
        earlier = _run_of(args[0]) if args else None
        if args and mine.options.here():
            try:
                if earlier is None:
                    mine.take(args[0])
                else:
                    mine.join(earlier)
            except Exception as error:  # fail-open by design
                log.error("DPA904 attaching failed inside dataproto-audit; training goes on.",
                          exc_info=error)  # fmt: skip
        return result

    def raised(self, args: Args, kwargs: Kwargs, error: BaseException) -> None:
        pass


def _lacking(trainer: Any, needed: tuple[str, ...]) -> list[str]:
    return [name for name in needed if not callable(getattr(trainer, name, None))]


def attach(
    trainer: Any = None, *, config: str | os.PathLike[str] | None = None, **settings: Any
) -> Attachment:
    """Audit ``trainer``, or every trainer of verl made later in this process.

    Args:
        trainer: a constructed ``RayPPOTrainer`` of verl (0.7.1; 0.9.1 with
            ``trainer.use_v1=False``), a ``PPOTrainer`` of 0.9.1 (V1, its default) or a subclass;
            None waits for one. One that is audited already stays with its first attachment.
        config: a YAML file with settings.
        settings: see :class:`~dataproto_audit.integrations.options.Options`; they win over
            ``DATAPROTO_AUDIT_*`` variables, which win over ``config``.

    Raises:
        UsageError: an unknown setting or value, or an object that is no such trainer. Nothing that
            happens later raises, but for ``on_fail="raise"``.
    """
    chosen = options(config, **settings)
    if trainer is None:
        attachment = Attachment(chosen)
        attachment.wait()
        return attachment
    if isinstance(trainer, type):
        raise UsageError(
            "DPA859", f"{trainer.__name__} is a class, and a trainer made of it is needed.",
            "Pass the object, or call attach() without one before it is made.",
        )  # fmt: skip
    if not callable(getattr(type(trainer), "fit", None)):  # hooks go by what the class defines
        raise UsageError(
            "DPA859", f"{type(trainer).__name__} is no trainer that can be attached to: its class "
            "has no fit.", "Pass verl's RayPPOTrainer or, in 0.9, its PPOTrainer.",
        )  # fmt: skip
    lacking = _lacking(trainer, NEEDED)
    if lacking and _lacking(trainer, NEEDED_V1):
        raise UsageError(
            "DPA859", f"{type(trainer).__name__} is no trainer that can be attached to: it has no "
            f"{', '.join(lacking)}.", "Pass verl's RayPPOTrainer or, in 0.9, its PPOTrainer.",
        )  # fmt: skip
    attachment, earlier = Attachment(chosen), _run_of(trainer)
    if earlier is not None:
        attachment.join(earlier)
    elif chosen.here():
        attachment.take(trainer)
    return attachment


def _run_of(trainer: Any) -> VerlRun | None:
    """What audits ``trainer`` already."""
    runs = (run for attachment in _LIVE for run in attachment.runs)
    return next((run for run in runs if run.trainer is trainer and run.attached), None)
