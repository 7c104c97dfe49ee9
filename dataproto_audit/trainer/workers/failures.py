"""From what Ray says about a failed call to one clear error: which rank, which stage, why.

When one rank fails, its peers fail too, a moment earlier or later, with errors about lost
connections. The cause is the rank that died, else the one that raised something of its own, else
the one that the others waited for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ray.exceptions import RayActorError, RayTaskError

from dataproto_audit.codes import CodedError, RunError
from dataproto_audit.trainer.remedies import RESUME
from dataproto_audit.trainer.workers.hang import Note, describe, late_ranks

# What gloo and NCCL say when a peer is gone, and when it did not come in time.
_LOST = re.compile(
    r"connection (reset|closed|refused)|broken pipe|remote process exited|peer closed|"
    r"socket closed|DistBackendError|DistNetworkError|gloo::|\[.*gloo.*\]",
    re.IGNORECASE,
)
_TIMED_OUT = re.compile(r"timed? ?out waiting|timeout|timed out", re.IGNORECASE)


def follows_from_a_peer(error: BaseException) -> bool:
    """Whether ``error`` may only say that another rank is gone or late."""
    return is_timeout(error) or bool(_LOST.search(_from_torch(error)))


def is_timeout(error: BaseException) -> bool:
    """Whether ``error`` says that a collective waited too long."""
    return bool(_TIMED_OUT.search(_from_torch(error)))


def explain(
    failures: Mapping[int, BaseException],
    *,
    stage: str,
    call: int,
    notes: Sequence[Note | None],
    timeout_s: float,
) -> CodedError:
    """The error to raise for ``failures`` (rank -> what Ray raised), at least one of them."""
    for rank, error in failures.items():
        if isinstance(error, RayActorError):
            return RunError(
                "DPA864", f"{stage}: the process of rank {rank} died ({reason_of(error)}).", RESUME
            )
    for rank, error in failures.items():
        if not follows_from_a_peer(error):
            return _raised(rank, error, stage)
    waiting = [rank for rank, error in failures.items() if is_timeout(error)]
    if waiting:
        return hung(stage=stage, call=call, notes=notes, timeout_s=timeout_s, waiting=waiting)
    rank, error = next(iter(failures.items()))
    return _raised(rank, error, stage)


def hung(
    *,
    stage: str,
    call: int,
    notes: Sequence[Note | None],
    timeout_s: float,
    waiting: Sequence[int] = (),
) -> RunError:
    """The error for a call that does not end: names the rank that the others wait for."""
    late = late_ranks(notes, call=call, waiting=waiting)
    who = "rank " + ", ".join(map(str, late)) if late else "a rank"
    return RunError(
        "DPA866",
        f"{stage}: a collective was not finished within {timeout_s:g} s; {who} did not come. "
        f"Last notes:\n{describe(notes)}\n",
        "Look at that rank's stage; raise trainer.collective_timeout_s if it was merely slow.",
    )


def _raised(rank: int, error: BaseException, stage: str) -> CodedError:
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, CodedError):
        return cause
    return RunError(
        "DPA863",
        f"{stage}: rank {rank} raised {type(cause).__name__}: {cause}.{_where(error)}",
        f"Its peers were stopped. {RESUME}",
    )


def _where(error: BaseException) -> str:
    """The innermost line of the worker's traceback, if Ray kept it."""
    lines = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', str(error))
    if not lines:
        return ""
    file, line, function = lines[-1]
    return f" (in {function}, {file.rsplit('/', 1)[-1]}:{line})"


def _from_torch(error: BaseException) -> str:
    """The text of what a collective may have raised (a RuntimeError or a subclass), else empty."""
    cause = getattr(error, "cause", None)
    if not isinstance(error, RayTaskError) or not isinstance(cause, RuntimeError):
        return ""
    return f"{type(cause).__name__}: {cause}"


def reason_of(error: RayActorError) -> str:
    """Why an actor is gone, in words, without Ray's ids, addresses and advice."""
    text = str(error)
    if "low on memory" in text or "OutOfMemory" in text:
        return "the machine ran out of memory"
    if "ray.kill" in text:
        return "it was ended through Ray"
    if "creation task" in text:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return f"starting it failed: {lines[-1][:200]}".rstrip(".")
    return "it was killed, crashed or ran out of memory"
