"""Layouts as they are written on the command line: ``fsdp:2+ulysses=2,megatron:tp=2,pp=2``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends.base import FSDPOptions, ModelSpec
from dataproto_audit.trainer.backends.megatron.options import MegatronOptions
from dataproto_audit.trainer.plans import MicroBatching

DEFAULT_ROWS = 2
"""Rows of a micro-batch where a layout says nothing: several micro-batches, so that sums over
them are seen."""

MOST_RANKS = 64
"""Processes that a comparison starts at most: they share one machine."""


@dataclass(frozen=True)
class Layout:
    """One way to run a model: engine, number of ranks, and how rows and tokens are cut.

    ``dtype`` is the precision of compute. ``tamper``, ``FILE:NAME``, names a function of a Python
    file that is called with each rank's backend before it runs, for seeded faults; what it returns
    is called afterwards.
    """

    name: str
    strategy: str
    world: int
    model: ModelSpec
    fsdp: FSDPOptions = field(default_factory=FSDPOptions)
    megatron: MegatronOptions = field(default_factory=MegatronOptions)
    micro: MicroBatching = field(default_factory=lambda: MicroBatching(rows=DEFAULT_ROWS))
    dtype: str = "float32"
    tamper: str | None = None

    @property
    def data_parallel(self) -> int:
        """Chunks that a batch is cut into."""
        if self.strategy == "megatron":
            return self.world // self.megatron.model_ranks
        return self.world // self.fsdp.sequence_parallel


def parse_layouts(text: str, *, model: str) -> list[Layout]:
    """The layouts of a comma-separated list, for the model folder ``model``.

    A layout is ``ENGINE:WORD+WORD...``; words of one layout may be separated by commas, too, since
    each layout begins with an engine. Words: a number of ranks (fsdp), ``packed``, ``fused``,
    ``bf16``, ``rows=N`` and ``tokens=N`` (size of a micro-batch), and

    * ``fsdp``: ``ulysses=N``, ``size=N`` (fsdp_size), ``wrap=root|layer``, ``reshard=0|1|N``;
    * ``megatron``: ``tp=N``, ``pp=N``, ``vpp=N``, ``cp=N``, ``dp=N``, ``sp``, ``distopt=0|1``,
      ``recompute=full|selective``.

    Raises DPA851 with the list of words, for a word said twice (``rows`` and ``tokens`` are one),
    and for more ranks than :data:`MOST_RANKS`.
    """
    groups: list[list[str]] = []
    for part in (piece.strip() for piece in text.split(",")):
        if ":" in part or not groups:
            groups.append([part])
        elif part:
            groups[-1].append(part)
    return [_layout(",".join(group), model) for group in groups if any(group)]


def _layout(name: str, model: str) -> Layout:
    engine, _, rest = name.partition(":")
    engine = {"fsdp2": "fsdp"}.get(engine, engine)
    if engine not in ("fsdp", "megatron"):
        raise UsageError(
            "DPA851", f"unknown layout {name!r}.", "Begin with fsdp: or megatron:, as in fsdp:2."
        )
    words = [word for word in rest.replace(",", "+").split("+") if word]
    layout = Layout(
        name, "fsdp2" if engine == "fsdp" else engine, 1, ModelSpec(model), micro=MicroBatching()
    )
    sizes: dict[str, int] = {}
    said: dict[str, str] = {}
    for word in words:
        key, _, value = word.partition("=")
        _refuse_twice(name, word, said)
        known = SHARED | (FSDP if engine == "fsdp" else MEGATRON)
        if word.isdecimal() and engine == "fsdp":
            sizes["dp"] = int(word)
        elif key == "dp" and engine == "megatron":
            sizes["dp"] = _number(name, word, value)
        elif key in known:
            layout = known[key](layout, _Value(name, word, value))
        else:
            raise UsageError(
                "DPA851",
                f"layout {name!r}: unknown {word!r}.",
                f"Known: {', '.join(sorted(known))}" + (", dp." if engine == "megatron" else "."),
            )
    if engine == "megatron":
        layout = _with_megatron(layout, sizes.get("dp", 1))
    else:
        layout = replace(layout, world=sizes.get("dp", 1))
    if not layout.micro.rows and not layout.micro.max_tokens and layout.megatron.pp == 1:
        layout = replace(layout, micro=replace(layout.micro, rows=DEFAULT_ROWS))
    if layout.world < 1:
        raise UsageError("DPA851", f"layout {name!r}: no rank.", "Give one rank or more.")
    if layout.world > MOST_RANKS:
        raise UsageError(
            "DPA851",
            f"layout {name!r}: {layout.world} ranks, each of them a process on this machine.",
            f"Give {MOST_RANKS} ranks or fewer.",
        )
    return layout


def _refuse_twice(name: str, word: str, said: dict[str, str]) -> None:
    """Raise DPA851 if ``word`` sets what an earlier one has set; ``said`` holds those."""
    key = word.partition("=")[0]
    subject = "the number of ranks" if word.isdecimal() else {"tokens": "rows"}.get(key, key)
    if subject in said:
        raise UsageError(
            "DPA851",
            f"layout {name!r}: {said[subject]!r} and {word!r} set the same.",
            "Say it once.",
        )
    said[subject] = word


def _with_megatron(layout: Layout, dp: int) -> Layout:
    options = layout.megatron
    # Rows of a size are cut as they come, as by train; without one into as many as stages.
    stages = options.pp if options.vpp or not layout.micro.rows else 1
    micro = replace(layout.micro, divisible_by=stages)
    return replace(layout, world=dp * options.model_ranks, micro=micro)


@dataclass(frozen=True)
class _Value:
    layout: str
    word: str
    text: str

    @property
    def number(self) -> int:
        return _number(self.layout, self.word, self.text)

    def one_of(self, *words: str) -> str:
        if self.text not in words:
            raise UsageError(
                "DPA851",
                f"layout {self.layout!r}: {self.word!r}.",
                f"Choose {', '.join(word or 'no value' for word in words)}.",
            )
        return self.text


def _number(name: str, word: str, value: str) -> int:
    if not value.isdecimal() or not int(value) or math.log10(int(value)) > 6:
        raise UsageError(
            "DPA851", f"layout {name!r}: {word!r} is no count.", "Give a positive number."
        )
    return int(value)


_Set = Callable[[Layout, _Value], Layout]


def _in(part: str, **changes: Callable[[_Value], Any]) -> _Set:
    def apply(layout: Layout, value: _Value) -> Layout:
        changed = replace(getattr(layout, part), **{k: f(value) for k, f in changes.items()})
        return replace(layout, **{part: changed})

    return apply


def _bf16(layout: Layout, value: _Value) -> Layout:
    if not _yes(value):
        return layout
    fsdp = replace(layout.fsdp, param_dtype="bfloat16")
    model = layout.model
    if layout.strategy == "megatron":
        model = replace(model, dtype="bfloat16")
    return replace(layout, fsdp=fsdp, model=model, dtype="bfloat16")


def _reshard(value: _Value) -> bool | int:
    return {"0": False, "1": True}.get(value.text, value.number if value.text != "0" else False)


def _number_of(value: _Value) -> int:
    return value.number


def _yes(value: _Value) -> bool:
    return value.one_of("", "0", "1") != "0"


SHARED: dict[str, _Set] = {
    "packed": _in("model", remove_padding=_yes),
    "fused": _in("model", fused_kernels=_yes),
    "bf16": _bf16,
    "rows": _in("micro", rows=_number_of),
    "tokens": _in("micro", rows=lambda _: 0, max_tokens=_number_of),
}
FSDP: dict[str, _Set] = {
    "ulysses": _in("fsdp", sequence_parallel=_number_of),
    "size": _in("fsdp", fsdp_size=_number_of),
    "wrap": _in("fsdp", wrap=lambda value: value.one_of("root", "layer")),
    "reshard": _in("fsdp", reshard_after_forward=_reshard),
}
MEGATRON: dict[str, _Set] = {
    "tp": _in("megatron", tp=_number_of),
    "pp": _in("megatron", pp=_number_of),
    "vpp": _in("megatron", vpp=_number_of),
    "cp": _in("megatron", cp=_number_of),
    "sp": _in("megatron", sp=_yes),
    "distopt": _in("megatron", distributed_optimizer=lambda v: v.one_of("0", "1") == "1"),
    "recompute": _in("megatron", recompute=lambda v: v.one_of("full", "selective")),
}
