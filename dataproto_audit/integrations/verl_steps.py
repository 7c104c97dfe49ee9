"""How many steps of training a run went through, and which of their stages were never seen.

A subclass may call its stages by other names, and may log by itself; a run in which nothing was
looked at must not end as one in which nothing was wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

log = logging.getLogger("dataproto_audit")
SEE = '("Which call is which stage" in docs/attaching.md)'


class Steps:
    """Steps of training, by their first call and by what was logged of them."""

    def __init__(self) -> None:
        self._any = False
        self._begun = self._logged = 0
        self._last: int | None = None

    def began(self, step: int, *, looks: bool) -> None:
        """``step`` begins, or goes on with more prompts; ``looks``: it is audited."""
        self._begun += looks and step != self._last
        self._any, self._last = True, step

    def logged(self, *, looks: bool) -> None:
        """The metrics of a step were logged."""
        self._logged += looks
        self._any = True

    def unseen(
        self,
        trainer: str,
        wanted: Sequence[str],
        observed: Iterable[str],
        *,
        begins_by: str,
        whole: bool,
        trains: bool,
    ) -> list[str]:
        """Those of the ``wanted`` stages of which nothing is ``observed``; the log says so.

        ``observed`` are boundaries (``stage.when``). ``whole``: the loop has returned, so no step
        was broken off; ``begins_by``: the call by which one begins; ``trains``: the run was to
        train. Empty where no step was looked at to its end because there was none.
        """
        looked = max(self._begun, self._logged) if whole else self._logged
        none = whole and trains and not self._any
        if not looked and not none:
            return []
        seen = {name.partition(".")[0] for name in observed}
        missed = [stage for stage in wanted if stage not in seen]
        if none:
            log.warning(
                "fit has ended and no step of training was seen: %s had none left to do, or does "
                "not call %s, by which a step begins %s. Nothing of its training is checked.",
                trainer, begins_by, SEE,
            )  # fmt: skip
        elif missed:
            log.warning(
                "nothing was seen of %s in %s steps: %s does not make the calls by which these "
                "stages are known %s. They are not checked.", ", ".join(missed), looked, trainer,
                SEE,
            )  # fmt: skip
        return missed
