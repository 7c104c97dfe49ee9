"""Does the engine hold what was sent? Compare tensors read back from it with those that arrived."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from dataproto_audit.codes import RunError
from dataproto_audit.trainer.backends.shards import ShardPayload, checksum, join
from dataproto_audit.trainer.rollout.base import SyncResult

_TINY = torch.finfo(torch.float32).tiny


def join_payloads(payloads: tuple[ShardPayload, ...]) -> dict[str, Tensor]:
    """Whole tensors under their Hugging Face names, tied second names left out.

    Raises RunError DPA867 when ranks are missing or exported at different versions.
    """
    try:
        return join(payloads)
    except ValueError as error:
        raise RunError(
            "DPA867",
            f"the weights for the rollout engine do not fit together: {error}.",
            "Export from every rank after the same update.",
        ) from error


def compare(
    found: Mapping[str, Tensor], sent: Mapping[str, Tensor], aliases: Mapping[str, str]
) -> tuple[dict[str, int], list[str], list[str]]:
    """Checksum by name of what the engine holds, the stale names, and the undecidable ones.

    ``found`` are the engine's tensors in its own dtype. They are compared as numbers after
    rounding ``sent`` to that dtype: reading a packed matrix back turns -0 into 0 and may flush
    denormals, which is no difference, and spreads a NaN over its row, which decides nothing. A
    tied second name is compared with its original.
    """
    sums: dict[str, int] = {}
    stale: list[str] = []
    undecided: list[str] = []
    for name, held in found.items():
        original = sent.get(aliases.get(name, name))
        if original is not None and _same(held, original):
            sums[name] = checksum(original)
            continue
        if original is not None and not bool(torch.isfinite(original).all()):
            undecided.append(name)
            continue
        sums[name] = checksum(held)
        if original is not None:
            stale.append(name)
    return sums, stale, undecided


def _same(held: Tensor, original: Tensor) -> bool:
    if held.shape != original.shape:
        return False
    expected = original.to(held.dtype)
    if torch.equal(held, expected):
        return True
    return bool(((held.float() - expected.float()).abs() < _TINY).all())


def result(
    payloads: tuple[ShardPayload, ...],
    *,
    sent: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    unread: Collection[str],
    reset: bool,
) -> SyncResult:
    """Put a :class:`SyncResult` with its evidence together."""
    aliases = payloads[0].aliases
    sums, stale, undecided = compare(found, sent, aliases)
    unreadable = {*unread, *undecided, *(set(sent) - set(found))}
    return SyncResult(payloads[0].version, reset, sums, sorted(stale), sorted(unreadable))
