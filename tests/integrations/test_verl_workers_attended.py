"""What the rows of an engine's micro-batch can see: masks of its own, and ranks that share rows."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dataproto_audit.integrations.verl_workers import seen_alone, stays_alone
from dataproto_audit.integrations.verl_workers_engine import EngineCalls
from dataproto_audit.integrations.verl_workers_legacy import _Legacy

LENGTHS = [5, 3, 4]


class Seen:
    """In the place of a record."""

    def __init__(self) -> None:
        self.told: list[tuple[list[int], list[int]]] = []

    def attended(self, lengths: list[int], seen: list[int]) -> None:
        self.told.append((lengths, seen))

    def micro_batch(self, *_: Any) -> None:
        pass

    def packed(self, *_: Any) -> None:
        self.told.append(([], []))


def told(inputs: dict[str, Any], *, padded: bool, **engine: Any) -> list[Any]:
    rows = [torch.arange(1, n + 1) for n in LENGTHS]
    micro = {"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
             "use_remove_padding": not padded}  # fmt: skip
    seen = Seen()
    EngineCalls(SimpleNamespace(record=seen)).packed(  # type: ignore[arg-type] # its record only
        (SimpleNamespace(**engine), micro), {}, (inputs, {})
    )
    return seen.told


def model(kernel: str) -> SimpleNamespace:
    return SimpleNamespace(module=SimpleNamespace(config=SimpleNamespace(
        _attn_implementation=kernel
    )))  # fmt: skip


def test_a_mask_of_the_engine_is_counted_by_row() -> None:
    mask = (torch.arange(5) < torch.tensor([[2], [2], [4]])).int()
    assert told({"attention_mask": mask}, padded=True) == [(LENGTHS, [2, 2, 4])]
    assert told({"attention_mask": None}, padded=True) == []
    assert told({"attention_mask": torch.ones(3, 1, 5, 5)}, padded=True) == []


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_ranks_that_share_rows_see_their_own_part(kernel: str) -> None:
    engine = {"use_ulysses_sp": True, "ulysses_sequence_parallel_size": 2}
    positions = {"position_ids": torch.arange(6)[None]}
    assert told(positions, padded=False, module=model(kernel), **engine) == [(LENGTHS, [5, 2, 4])]


@pytest.mark.parametrize("kernel", ["flash_attention_2", "flash_attention_3", ""])
def test_kernels_that_exchange_or_are_unknown_are_not_judged(kernel: str) -> None:
    engine = {"use_ulysses_sp": True, "ulysses_sequence_parallel_size": 2}
    positions = {"position_ids": torch.arange(6)[None]}
    assert told(positions, padded=False, module=model(kernel), **engine) == []


def test_a_kernel_that_somebody_replaced_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchanging() -> None: ...

    models = ModuleType("transformers.modeling_utils")
    models.ALL_ATTENTION_FUNCTIONS = {"sdpa": exchanging}  # type: ignore[attr-defined] # stand-in
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", models)
    assert not stays_alone(model("sdpa"))
    exchanging.__module__ = "transformers.integrations.sdpa_attention"
    assert stays_alone(model("sdpa"))
    assert not stays_alone(model("flash_attention_2"))


def test_packed_rows_of_one_rank_are_told_as_before() -> None:
    assert told({"position_ids": torch.arange(12)[None]}, padded=False, module=model("sdpa")) == [
        ([], [])
    ]


def test_a_row_in_one_slice_is_whole() -> None:
    assert seen_alone([4, 4], 2) == [4, 4]
    assert seen_alone([3, 3], 1) == [3, 3]
    assert seen_alone([1, 7], 4) == [1, 2]
    assert seen_alone([], 2) == []


@pytest.mark.parametrize(
    ("kernel", "splits", "cut"),
    [("sdpa", 2, True), ("sdpa", 1, False), ("flash_attention_2", 2, False)],
)
def test_the_legacy_actor_tells_the_same(kernel: str, splits: int, cut: bool) -> None:
    mask = (torch.arange(5) < torch.tensor(LENGTHS)[:, None]).long()
    actor = SimpleNamespace(
        ulysses_sequence_parallel_size=splits, use_remove_padding=True, actor_module=model(kernel)
    )
    seen = Seen()
    hooks = _Legacy(SimpleNamespace(record=seen))  # type: ignore[arg-type] # its record only
    hooks.micro_batch((actor, {"input_ids": mask, "attention_mask": mask}), {})
    assert seen.told == ([(LENGTHS, [5, 2, 4])] if cut else [])
