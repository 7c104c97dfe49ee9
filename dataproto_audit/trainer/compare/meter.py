"""What a rank holds and sends while it works: live bytes by kind, collectives by name.

Counted at the dispatcher, so that everything that torch allocates or sends is seen, on CPUs as on
GPUs. A rank's peak is exact in the operations it looks at; memory that a kernel takes and gives
back inside one operation is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations")
_SENDING = ("c10d", "_c10d_functional")
_GATHERING = (*_SENDING, "fsdp")
_NAMES = {
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
}
"""Collectives by what the names of their operators hold, without underscores: the c10d ones are
spelled ``_allgather_base_``, the functional ones ``all_gather_into_tensor``."""


@dataclass
class Usage:
    """What was counted: ``peak`` bytes by kind at the moment of the largest sum, ``calls`` and
    ``sent`` bytes by collective.

    ``sent`` counts what a call works on, once: the tensor of an all_reduce, broadcast, send or
    all_to_all, the gathered result of an all_gather, the whole input of a reduce_scatter. What a
    wire carries depends on the algorithm; a ring over n ranks carries (n - 1) / n of it per rank,
    twice for an all_reduce.
    """

    peak: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    calls: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """Live bytes at the worst moment."""
        return sum(self.peak.values())


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Counts while it is entered.

    ``known`` names the tensors of a kind from the start. What collectives touch is ``gathered``
    (whole weights, whole gradients and their buffers), everything else ``activations``; a kind that
    is told later holds for the past, too.
    """

    def __init__(self, known: dict[str, Iterable[Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._numbers: Any = WeakIdKeyDictionary()
        self._kinds: list[str] = []
        self._usage = Usage()
        self._peak: dict[int, int] = {}
        self._peak_bytes = 0
        self._paused = False
        for kind, tensors in known.items():
            self.know(kind, tensors)

    def know(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count ``tensors`` as ``kind``."""
        for tensor in tensors:
            self._kinds[self._number(tensor)] = kind

    def usage(self) -> Usage:
        """What was counted so far."""
        peak = dict.fromkeys(KINDS, 0)
        for number, size in self._peak.items():
            peak[self._kinds[number]] += size
        return Usage(peak, dict(self._usage.calls), dict(self._usage.sent))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, then look at what it touched and what lives."""
        out = func(*args, **(kwargs or {}))
        if self._paused:
            return out
        gathers = func.namespace in _GATHERING
        for tensor in _tensors((args, kwargs, out)):
            number = self._number(tensor)
            if gathers and self._kinds[number] == "activations":
                self._kinds[number] = "gathered"
        if func.namespace in _SENDING:
            self._sent(func._schema.name.split("::")[-1], [*args, out])
        self._look()
        return out

    def _number(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        number: int | None = self._numbers.get(storage)
        if number is None:
            number = self._numbers[storage] = len(self._kinds)
            self._kinds.append("activations")
        return number

    def _sent(self, name: str, sides: Iterable[Any]) -> None:
        name = name.replace("_", "")
        plain = next((word for key, word in _NAMES.items() if key in name), None)
        if plain is None:
            return
        # Input and output are arguments or, of a functional collective, argument and result; each
        # may be a list of pieces. The larger side is the whole.
        size = max(sum(t.numel() * t.element_size() for t in _tensors(side)) for side in sides)
        self._usage.calls[plain] = self._usage.calls.get(plain, 0) + 1
        self._usage.sent[plain] = self._usage.sent.get(plain, 0) + size

    def _look(self) -> None:
        now = {number: storage.nbytes() for storage, number in self._numbers.items()}
        whole = sum(now.values())
        if whole > self._peak_bytes:
            self._peak, self._peak_bytes = now, whole


def _tensors(tree: Any) -> Iterator[Tensor]:
    for leaf in tree_iter(tree):
        if isinstance(leaf, Tensor):
            leaf = getattr(leaf, "_local_tensor", leaf)  # a DTensor's own part
            yield leaf.elem if isinstance(leaf, AsyncCollectiveTensor) else leaf


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind ``tensors``, each counted once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
