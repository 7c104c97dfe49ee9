"""Checks a batch against the declared fields of a stage, by jaxtyping.

Sizes are pre-bound in each jaxtyping context from the view, so a field is never compared with
whichever field happened to come first. A signature (names, dtypes, shapes) that passed once is not
checked again. Jagged fields compare row lengths instead, since jaxtyping gives nested tensors a
symbol of their own for equal lengths.

Not covered here: values, and the identity of rows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Shaped, jaxtyped
from torch import Tensor

from dataproto_audit.batch import BatchView
from dataproto_audit.contracts.dims import factor_story
from dataproto_audit.contracts.fields import FIELDS, Field
from dataproto_audit.contracts.stages import Stage
from dataproto_audit.dump.record import short_dtype


@dataclass(frozen=True)
class Violation:
    """One broken declaration: ``code`` and what was expected and found."""

    code: str
    field: str
    expected: str
    actual: str
    evidence: Mapping[str, object]
    causes: tuple[str, ...] = ()


_SIZES = Shaped[np.ndarray, "rows prompt response"]
_PASSED: set[tuple[object, ...]] = set()
_SEEN_MAX = 4096


def check_stage(
    stage: type[Stage],
    view: BatchView,
    *,
    when: str = "after",
    factors: Mapping[str, int] | None = None,
) -> list[Violation]:
    """Violations of the stage's declaration by ``view``, most basic first.

    ``when="before"`` demands what the stage reads, ``"after"`` also what it adds. ``factors`` are
    known counts (n, data-parallel size...) that may explain a size.
    """
    return [*missing_fields(stage, view, when=when), *wrong_fields(view, factors=factors)]


def missing_fields(stage: type[Stage], view: BatchView, *, when: str) -> list[Violation]:
    """Fields that the stage reads (``before``) or adds (``after``) and the batch lacks (DPA101)."""
    required = stage.reads if when == "before" else stage.adds
    return [
        _missing(name)
        for name in required
        if FIELDS[name].kind != "meta" and not view.has(name) and name not in view.odd
    ]


def wrong_fields(view: BatchView, *, factors: Mapping[str, int] | None = None) -> list[Violation]:
    """Declared fields of the wrong kind or size (DPA102, DPA103), arrays of other rows (DPA109)."""
    if view.odd:
        return [*_no_fields(view), *_sized(view, factors)]
    return _sized(view, factors)


def _no_fields(view: BatchView) -> Iterable[Violation]:
    """Entries under the name of a declared field that are none: a text, None, no data."""
    for name, value in view.odd.items():
        field = FIELDS.get(name)
        if field is None or field.kind == "meta":
            continue
        if field.kind == "tensor":
            code, expected = "DPA102", f"a tensor, {field.number}[{field.axes.replace(' ', ',')}]"
        else:
            code, expected = "DPA109", f"one entry for each of {view.rows} rows"
        yield Violation(code, name, expected, said(value), {}, ("wrong_dtype",))


def said(value: object) -> str:
    """What something that is no field is, in short: ``str 'abc'``, ``None``."""
    if isinstance(value, Tensor):
        return f"a tensor without data, on the device {value.device}"
    if value is None:
        return "None"
    told = repr(value) if isinstance(value, (str, int, float)) else ""
    return f"{type(value).__name__} {told[:40]}".strip()


def _sized(view: BatchView, factors: Mapping[str, int] | None) -> list[Violation]:
    if view.fits_declaration == len(FIELDS):
        return []
    signature = (len(FIELDS), view.rows, view.prompt, view.response, *view.signature)
    values_matter = view.layout == "jagged"  # lengths of padded sides come from the attention mask
    if signature in _PASSED and not values_matter:
        view.fits_declaration = len(FIELDS)
        return []
    found = [*_wrong_tensors(view, factors or {}), *_wrong_arrays(view, factors or {})]
    if not found:
        if len(_PASSED) >= _SEEN_MAX:
            _PASSED.clear()
        _PASSED.add(signature)
        view.fits_declaration = len(FIELDS)
    return found


def unreadable(view: BatchView, wrong: Iterable[Violation]) -> dict[str, str]:
    """Fields that no probe should read, each with what it is; of the violations ``wrong``.

    A mask of floats that are all exactly 0 or 1 is of the wrong kind and plain to read: ``view``
    gives it as integers from here on.
    """
    out = {}
    for violation in wrong:
        if violation.code == "DPA102" and _float_mask(view, violation.field):
            view.read_as(violation.field, view.numpy(violation.field).astype(np.int64))
        else:
            out[violation.field] = f"is {violation.actual}"
    return out


def _float_mask(view: BatchView, name: str) -> bool:
    tensor = view.tensors.get(name)
    if tensor is None or "bool" not in FIELDS[name].number or not tensor.is_floating_point():
        return False
    values = view.numpy(name)
    return bool(((values == 0) | (values == 1)).all())


def unchecked(view: BatchView) -> dict[str, str]:
    """Declared fields that could not be checked, each with the axis whose size is unknown."""
    sizes = _sizes(view)
    return {
        name: axis
        for name in view.tensors
        if name in FIELDS and FIELDS[name].kind == "tensor"
        for axis in [_unbound(FIELDS[name], sizes)]
        if axis
    }


def undeclared(view: BatchView) -> tuple[str, ...]:
    """Fields of the batch that no stage declares; they are allowed, and listed."""
    return tuple(name for name in view.names if name not in FIELDS)


def describe(view: BatchView, name: str) -> str:
    """dtype and shape in short: ``f32[512,4]``."""
    tensor = view.tensors.get(name)
    if tensor is None:
        array = view.arrays[name]
        return f"{array.dtype}[{','.join(map(str, array.shape))}]"
    kind = short_dtype(view, name)
    if tensor.is_nested:
        return f"{kind}[{tensor.size(0)},(jagged)]"
    return f"{kind}[{','.join(str(size) for size in tensor.shape)}]"


def _missing(name: str) -> Violation:
    field = FIELDS[name]
    return Violation(
        "DPA101",
        name,
        f"{field.number}[{field.axes.replace(' ', ',')}], written by {field.producer}",
        "not in the batch",
        {},
        ("field_forgotten",),
    )


def _sizes(view: BatchView) -> dict[str, int | None]:
    return {"rows": view.rows, "prompt": view.prompt, "response": view.response}


def _unbound(field: Field, sizes: Mapping[str, int | None]) -> str:
    """The first axis of the field whose size the batch does not tell; '' when all are known."""
    axes = [axis for part in field.axes.split() for axis in part.split("+")]
    return next((axis for axis in axes if axis in sizes and sizes[axis] is None), "")


def _wrong_tensors(view: BatchView, factors: Mapping[str, int]) -> Iterable[Violation]:
    declared = [FIELDS[n] for n in view.tensors if n in FIELDS and FIELDS[n].kind == "tensor"]
    sizes = _sizes(view)
    bound = np.broadcast_to(np.empty((), bool), tuple(s or 0 for s in sizes.values()))
    with jaxtyped("context"):
        if not isinstance(bound, _SIZES):
            raise RuntimeError("sizes could not be bound")
        known: dict[tuple[object, ...], bool] = {}  # fields declared alike, of tensors made alike
        wrong = []
        for field in declared:
            tensor = view.tensors[field.name]
            if tensor.is_nested:
                continue
            alike = (field.annotation, tensor.dtype, tensor.shape)
            if alike not in known:
                known[alike] = (
                    _misshapen(field, tensor)
                    if _unbound(field, sizes)
                    else not isinstance(tensor, field.annotation)
                )
            if known[alike]:
                wrong.append(field)
    for field in wrong:
        yield _explain(field, view, sizes, factors)
    for field in declared:
        if view.tensors[field.name].is_nested:
            yield from _wrong_jagged(field, view)


def _misshapen(field: Field, tensor: Tensor) -> bool:
    """Whether number of axes or kind of number are wrong: all that needs no size of the batch."""
    axes = {len(form.dim_str.split()) for form in field.forms}
    kinds = field.number.split(" or ")
    return tensor.dim() not in axes or _number_of(tensor.dtype) not in kinds


def _explain(
    field: Field,
    view: BatchView,
    sizes: Mapping[str, int | None],
    factors: Mapping[str, int],
) -> Violation:
    tensor = view.tensors[field.name]
    parts = field.axes.split()
    want = [_size(part, sizes) for part in parts]
    spelled = ",".join(
        part if size is None else f"{part}={size}" for part, size in zip(parts, want, strict=True)
    )
    expected, actual = f"{field.number}[{spelled}]", describe(view, field.name)
    pairs = list(zip(tensor.shape, want, strict=False))
    if len(tensor.shape) == len(want) and all(size in (got, None) for got, size in pairs):
        return Violation("DPA102", field.name, expected, actual, {}, ("wrong_dtype",))
    evidence: dict[str, object] = {k: v for k, v in sizes.items() if v is not None}
    causes = ["wrong_width"]
    if len(tensor.shape) == len(want):
        for axis, (got, wanted) in enumerate(pairs):
            story = factor_story(int(got), wanted or 0, factors)
            if story:
                evidence["factor"] = story
            if wanted not in (got, None) and axis == 0:
                causes = ["not_repeated" if story else "rows_lost"]
                if wanted and got > wanted and _copied(tensor, int(got) // wanted):
                    causes = ["gathered_twice", "repeated_twice"]
    return Violation("DPA103", field.name, expected, actual, evidence, tuple(causes))


def _copied(tensor: Tensor, times: int) -> bool:
    """True where each row of the tensor is there ``times`` times, side by side or part by part."""
    if times < 2 or tensor.shape[0] % times:
        return False
    if bool((tensor == tensor[:1]).all()):  # all rows alike say nothing
        return False
    beside = tensor.reshape(-1, times, *tensor.shape[1:])
    parts = tensor.reshape(times, -1, *tensor.shape[1:])
    return bool((beside == beside[:, :1]).all()) or bool((parts == parts[:1]).all())


def _size(part: str, sizes: Mapping[str, int | None]) -> int | None:
    """Size of ``prompt+response`` and the like; None for an axis of the user's own."""
    own = [sizes.get(axis) for axis in part.split("+")]
    return None if None in own else sum(size or 0 for size in own)


def _number_of(dtype: torch.dtype) -> str:
    """The kind of number, in the words of :attr:`Field.number`."""
    if dtype.is_floating_point:
        return "float"
    return "bool" if dtype == torch.bool else "integer"


def _wrong_jagged(field: Field, view: BatchView) -> Iterable[Violation]:
    """Kind of number and row lengths of a jagged field, against ``prompts`` and ``responses``."""
    if _number_of(view.tensors[field.name].dtype) not in field.number.split(" or "):
        expected, actual = f"{field.number} values", describe(view, field.name)
        yield Violation("DPA102", field.name, expected, actual, {}, ("wrong_dtype",))
        return
    axes = field.axes.split()[-1].split("+")
    anchors = ["prompts" if axis == "prompt" else "responses" for axis in axes]
    if any(anchor not in view.tensors for anchor in anchors):
        return
    expected, evidence = f"row lengths of {'+'.join(axes)}", {"rows": view.rows}
    parts, got = [view.side_lengths(anchor) for anchor in anchors], view.lengths(field.name)
    same = {len(lengths) for lengths in (*parts, got)} == {view.rows}
    want = sum(parts) if same else None
    if same and bool((got == want).all()):
        return
    rows = np.flatnonzero(got != want)[:8].tolist() if same else []
    yield Violation(
        "DPA103",
        field.name,
        expected,
        f"{len(got)} rows, lengths differ in rows {rows}" if same else f"{len(got)} rows",
        evidence,
        ("wrong_width",) if same else ("rows_lost",),
    )


def _wrong_arrays(view: BatchView, factors: Mapping[str, int]) -> Iterable[Violation]:
    for name, array in view.arrays.items():
        if name in FIELDS and FIELDS[name].kind == "tensor":
            expected = f"a tensor, {FIELDS[name].number}[{FIELDS[name].axes.replace(' ', ',')}]"
            actual = f"a non-tensor field, {describe(view, name)}"
            yield Violation("DPA102", name, expected, actual, {}, ("wrong_dtype",))
            continue
        if array.ndim and array.shape[0] == view.rows:
            continue
        got = array.shape[0] if array.ndim else 0
        story = factor_story(got, view.rows, factors)
        evidence = {"factor": story} if story else {}
        yield Violation(
            "DPA109",
            name,
            f"one entry for each of {view.rows} rows",
            describe(view, name),
            evidence,
            ("not_repeated",) if story else ("rows_lost",),
        )
