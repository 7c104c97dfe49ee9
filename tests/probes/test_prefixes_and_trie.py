"""Shared prefixes: what they are, and what they say about log-probs."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto_audit.batch import BatchView
from dataproto_audit.probes.context import Context, Settings
from dataproto_audit.probes.noise import FP32, HALF_NOISE, Noise
from dataproto_audit.probes.trie import (
    beyond_one,
    contradictions,
    largest_sum,
    prefix_sums,
    shared_cells,
    spreads,
)
from dataproto_audit.testing.healthy import Boundary, Options

from ._corrupt import (
    Case,
    Change,
    Truth,
    at,
    audit,
    check_case,
    each,
    loner,
    own,
    prompt_rows,
    twins,
)

HOME = {
    "rollout_log_probs": "rollout",
    "old_log_probs": "old_log_prob",
    "ref_log_prob": "ref_log_prob",
}
GAP = {"rollout_log_probs": (), "old_log_probs": ("DPA303",), "ref_log_prob": ("DPA305",)}


def _one_of_twins(field: str) -> Change:
    def change(b: Boundary) -> Truth:
        rows = twins(b)
        own(b, field)[rows[0], 0] -= 0.5
        named = rows if len(rows) == 2 else rows[:1]  # of two rows either may be the wrong one
        return at(field, *((row, 0) for row in named))

    change.__name__ = f"{field}_of_one_twin"
    return change


def _too_likely(field: str) -> Change:
    def change(b: Boundary) -> Truth:
        row = loner(b)
        own(b, field)[row, 0] = -1e-4
        return at(field, *((other, 0) for other in prompt_rows(b, row)))

    change.__name__ = f"{field}_too_likely"
    return change


CASES = [
    *(
        Case(f"{field}_same_prefix", "DPA306", stage, _one_of_twins(field), "row_outlier",
             "one log-prob for one token after one prefix", also=GAP[field])
        for field, stage in HOME.items()
    ),
    *(
        Case(f"{field}_prefix_sum", "DPA307", stage, _too_likely(field), "positive_log_prob",
             "probabilities of distinct next tokens sum to at most 1", also=GAP[field])
        for field, stage in HOME.items()
    ),
]  # fmt: skip


@each(CASES)
def test_it_is_found_where_it_is(case: Case) -> None:
    check_case(case)


def test_of_three_twins_the_odd_one_is_named() -> None:
    options = Options(prompts=1, n=8, vocab=4, truncated=0, one_token=0, seed=3, ranks=1)

    def odd(b: Boundary) -> Truth:
        rows = twins(b)
        assert len(rows) > 2
        own(b, "rollout_log_probs")[rows[1], 0] -= 0.2
        return at("rollout_log_probs", (rows[1], 0))

    ran = audit(options, {"rollout": odd}, until="rollout")
    [finding] = ran.findings("rollout_log_probs_same_prefix", "rollout")
    assert (finding.rows, finding.columns) == (ran.truths[0].rows, ran.truths[0].columns)


def test_one_column_late_is_seen_without_a_second_log_prob() -> None:
    """All distinct tokens after one prefix have one log-prob: that of the token before."""
    options = Options(prompts=8, n=8, vocab=8, response_width=6, truncated=0, one_token=0)

    def late(b: Boundary) -> Truth:
        values = own(b, "rollout_log_probs")
        values[:] = torch.roll(values, 1, dims=1)
        values[:, 0] = -1.0
        return Truth("rollout_log_probs")

    ran = audit(options, {"rollout": late}, until="rollout")
    codes = {f.code for f in ran.report("rollout")}
    assert codes & {"DPA304", "DPA306", "DPA307"}
    assert all(f.causes[0] == "shift" for f in ran.report("rollout")), list(map(str, ran.bad()))


@pytest.mark.parametrize("probe", ["same_prefix", "prefix_sum"])
def test_stale_rollouts_are_no_one_policy(probe: str) -> None:
    ran = audit(until="old_log_prob", settings={"on_policy": False})
    outcome = ran.outcome(f"rollout_log_probs_{probe}", "rollout")
    assert (outcome.kind, outcome.reason) == (
        "not_applicable", "rows may come from different weights",
    )  # fmt: skip
    assert ran.outcome(f"old_log_probs_{probe}", "old_log_prob").kind == "passed"


@pytest.mark.parametrize("probe", ["same_prefix", "prefix_sum"])
def test_the_rollout_is_not_judged_where_staleness_is_unknown(probe: str) -> None:
    make = _one_of_twins if probe == "same_prefix" else _too_likely
    change = {"rollout": make("rollout_log_probs")}
    ran = audit(change=change, until="rollout", settings={"on_policy": None})
    outcome = ran.outcome(f"rollout_log_probs_{probe}", "rollout")
    assert outcome.kind == "not_checkable"
    assert outcome.reason.startswith("tell settings.on_policy: ")
    assert not ran.bad()


def test_two_engines_that_contradict_themselves_alike_saw_more_than_the_ids() -> None:
    """A session or a system prompt outside of the ids belongs to the prefix."""

    def too_likely(field: str) -> Any:
        return {HOME[field]: _too_likely(field)}

    both = too_likely("rollout_log_probs") | too_likely("old_log_probs")
    ran = audit(Options(balanced=False), both, until="old_log_prob", settings={"on_policy": None})
    outcome = ran.outcome("old_log_probs_prefix_sum", "old_log_prob")
    assert outcome.kind == "not_checkable"
    assert outcome.reason.startswith("rollout_log_probs says so, too: ")
    alone = audit(change=too_likely("old_log_probs"), until="old_log_prob")
    assert alone.outcome("old_log_probs_prefix_sum", "old_log_prob").kind == "failed"


@pytest.mark.parametrize("probe", ["same_prefix", "prefix_sum"])
def test_images_are_part_of_the_prefix(probe: str) -> None:
    def with_images(b: Boundary) -> Truth:
        images = np.empty(len(b.batch), object)
        images[:] = [{"pixels": 1}] * len(images)
        b.batch.non_tensor_batch["multi_modal_inputs"] = images
        return Truth("")

    ran = audit(change={"rollout": with_images}, until="rollout")
    outcome = ran.outcome(f"rollout_log_probs_{probe}", "rollout")
    assert (outcome.kind, outcome.reason) == ("not_applicable", "images are part of the prefix")


@pytest.mark.parametrize("probe", ["same_prefix", "prefix_sum"])
def test_without_shared_prefixes_nothing_can_be_said(probe: str) -> None:
    ran = audit(Options(n=1, seed=2), until="rollout")
    outcome = ran.outcome(f"rollout_log_probs_{probe}", "rollout")
    assert (outcome.kind, outcome.reason) == ("not_checkable", "no two rows share a prefix")


# -- the structure itself --------------------------------------------------------------------------


def _view(prompts: Any, responses: Any, used: Any, mask: Any, values: Any = None) -> BatchView:
    attention = np.concatenate([np.ones_like(prompts), used], 1)
    fields = {"prompts": prompts, "responses": responses, "attention_mask": attention,
              "response_mask": mask}  # fmt: skip
    if values is not None:
        fields["old_log_probs"] = values
    return BatchView.of({name: torch.from_numpy(value) for name, value in fields.items()})


def _context() -> Context:
    return Context(1, "old_log_prob", "after", Settings())


def _by_hand(prompts: Any, responses: Any, used: Any, mask: Any) -> dict[Any, set[Any]]:
    """Cells by their (prefix, token), of the prefixes that two rows or more begin with."""
    prefixes: dict[Any, list[Any]] = defaultdict(list)
    for row in range(len(prompts)):
        for column in range(int(used[row].sum()) + 1):
            prefix = (tuple(prompts[row]), tuple(responses[row, :column]))
            prefixes[prefix].append((row, column))
    pairs: dict[Any, set[Any]] = defaultdict(set)
    for prefix, cells in prefixes.items():
        for row, column in cells:
            if len(cells) > 1 and column < used[row].sum() and mask[row, column]:
                pairs[prefix, int(responses[row, column])].add((row, column))
    return pairs


@given(seed=st.integers(0, 10_000), rows=st.integers(1, 9), width=st.integers(1, 6),
       ids=st.integers(1, 3))  # fmt: skip
def test_shared_cells_are_those_found_by_hand(seed: int, rows: int, width: int, ids: int) -> None:
    random = np.random.default_rng(seed)
    prompts = random.integers(1, 3, (rows, 2))
    responses = random.integers(3, 3 + ids, (rows, width))
    ends = random.integers(0, width + 1, rows)
    used = (np.arange(width)[None] < ends[:, None]).astype(np.int64)
    responses[used == 0] = 0
    mask = used * (random.random((rows, width)) < 0.8)
    cells = shared_cells(_view(prompts, responses, used, mask), _context())
    pairs = _by_hand(prompts, responses, used, mask)
    parts = np.split(np.arange(len(cells.row)), cells.start[1:]) if len(cells.start) else []
    found = [{(int(cells.row[i]), int(cells.column[i])) for i in part} for part in parts]
    assert sorted(map(sorted, found)) == sorted(map(sorted, pairs.values()))
    prefix_of = {}
    for (prefix, _), group in pairs.items():
        for cell in group:
            prefix_of[cell] = prefix
    for i, j in zip(range(len(cells.row)), range(1, len(cells.row)), strict=False):
        left, right = ((int(cells.row[k]), int(cells.column[k])) for k in (i, j))
        assert (cells.prefix[i] == cells.prefix[j]) == (prefix_of[left] == prefix_of[right])


def test_prefixes_longer_than_one_chunk() -> None:
    responses = np.full((3, 200), 7)
    responses[1, 150] = 8
    responses[2, 0] = 9
    ones = np.ones_like(responses)
    cells = shared_cells(_view(np.full((3, 2), 1), responses, ones, ones), _context())
    deep = cells.column[cells.row == 1]
    assert deep.max() == 150
    assert sorted(cells.column[cells.row == 2].tolist()) == [0]


def test_the_structure_is_kept_until_a_tensor_is_written() -> None:
    ones = np.ones((2, 3), np.int64)
    view, context = _view(ones, ones.copy(), ones.copy(), ones.copy()), _context()
    first = shared_cells(view, context)
    assert shared_cells(view, context) is first
    view.tensors["responses"][1, 0] = 5
    again = BatchView.of(view.tensors)
    assert shared_cells(again, context) is not first
    assert len(shared_cells(again, context).start) == 2


def test_rows_that_moved_take_the_structure_along() -> None:
    random = np.random.default_rng(3)
    fields = [random.integers(0, 2, (12, width)) for width in (1, 3)]
    fields += [np.ones((12, 3), np.int64), random.integers(0, 2, (12, 3))]
    order, context = random.permutation(12), _context()

    def cells(fields: list[Any], context: Context) -> list[tuple[int, ...]]:
        found = shared_cells(_view(*fields), context)
        pair = np.repeat(np.arange(len(found.start)), found.sizes())
        columns = (found.prefix, pair, found.column, found.row)
        return sorted(zip(*(column.tolist() for column in columns), strict=True))

    assert cells(fields, context) == cells(fields, _context())
    built = context.cache["trie"][0]
    moved = [field[order] for field in fields]
    assert cells(moved, context) == cells(moved, _context())
    assert context.cache["trie"][0].start is built.start
    moved[1][0, 0] ^= 1
    assert cells(moved, context) == cells(moved, _context())
    assert context.cache["trie"][0].start is not built.start


def test_sums_and_spreads_of_a_small_batch() -> None:
    prompts, responses = np.full((3, 1), 1), np.array([[5], [5], [6]])
    ones = np.ones((3, 1), np.int64)
    logs = np.log(np.array([[0.6], [0.5], [0.5]]))
    view = _view(prompts, responses, ones, ones, logs)
    cells = shared_cells(view, _context())
    values = logs[cells.row, cells.column]
    spread, _, wrong = spreads(cells, values, FP32)
    assert wrong.tolist() == [0]
    assert spread[0] == pytest.approx(np.log(0.6 / 0.5))
    total = prefix_sums(cells, values)
    assert total.max() == pytest.approx(1.1)
    assert largest_sum(FP32) < 1.1 < largest_sum(HALF_NOISE)
    assert contradictions(view, _context(), "old_log_probs", FP32) == 2
    assert contradictions(view, _context(), "old_log_probs", HALF_NOISE) == 0


def test_contradictions_need_all_fields_and_a_shared_prefix() -> None:
    one = np.ones((1, 2), np.int64)
    view = _view(one, one, one, one, np.zeros((1, 2)))
    assert contradictions(view, _context(), "old_log_probs", FP32) is None
    del view.tensors["prompts"]
    assert contradictions(view, _context(), "old_log_probs", FP32) is None


def _sums_beyond(prefixes: int, lifted: int, total: float, noise: Noise) -> tuple[int, int]:
    """All three tokens of a vocabulary after each of ``prefixes``; the first of some is likelier.

    Returns how many prefixes are wrong, and how many contradictions that makes.
    """
    prompts = np.repeat(np.arange(1, prefixes + 1), 3)[:, None]
    responses = np.tile([5, 6, 7], prefixes)[:, None]
    likely = np.tile([0.3, 0.3, 0.4], prefixes)[:, None]
    likely[: 3 * lifted : 3] += total - 1.0
    ones = np.ones(responses.shape, np.int64)
    view = _view(prompts, responses, ones, ones, np.log(likely))
    cells = shared_cells(view, _context())
    values = np.log(likely)[cells.row, cells.column]
    sums, wrong = beyond_one(cells, values, noise)
    assert sums.max() == pytest.approx(max(1.0, total))
    said = contradictions(view, _context(), "old_log_probs", noise)
    assert said is not None
    return len(wrong), said


@pytest.mark.parametrize(
    ("prefixes", "lifted", "total", "wrong"),
    [
        (1, 1, 1.35, 0),  # one token far off in a small vocabulary
        (10, 2, 1.35, 0), (10, 3, 1.35, 3),
        (100, 7, 1.35, 0), (100, 8, 1.35, 8),  # 2, and three times the root of 2 and one more
        (1, 1, 1.59, 0), (1, 1, 1.61, 1), (100, 1, 1.61, 1),
        (100, 100, 1.19, 0), (100, 100, 1.21, 100),
    ],
)  # fmt: skip
def test_a_few_sums_above_one_are_tokens_far_off(
    prefixes: int, lifted: int, total: float, wrong: int
) -> None:
    assert _sums_beyond(prefixes, lifted, total, HALF_NOISE) == (wrong, wrong)


@pytest.mark.parametrize(("total", "wrong"), [(1.0005, 0), (1.0015, 1), (1.35, 1)])
def test_in_full_precision_every_sum_counts(total: float, wrong: int) -> None:
    assert _sums_beyond(40, 1, total, FP32) == (wrong, wrong)


@pytest.mark.parametrize("vocab", [4, 5])
@pytest.mark.parametrize("seed", range(3))
def test_far_tokens_of_a_small_vocabulary_are_quiet(vocab: int, seed: int) -> None:
    """The gaps of published runs, where every token of the vocabulary is sampled."""
    options = Options(vocab=vocab, seed=seed, prompts=12, n=16, response_width=16, truncated=0,
                      one_token=0, rollout_dtype="bfloat16", engine_gap=0.009,
                      engine_tail=0.01)  # fmt: skip
    ran = audit(options, until="rollout")
    assert ran.outcome("rollout_log_probs_prefix_sum", "rollout").kind == "passed"
    assert not ran.bad()


def _pairs(*values: list[float]) -> Any:
    """Cells of rows with one prompt whose first token is the same within each list."""
    rows = [value for part in values for value in part]
    responses = np.concatenate([np.full((len(part), 1), 5 + at) for at, part in enumerate(values)])
    ones = np.ones((len(rows), 1), np.int64)
    whole = np.array(rows)[:, None]
    cells = shared_cells(_view(ones, responses, ones, ones, whole), _context())
    return cells, whole[cells.row, cells.column]


@pytest.mark.parametrize(("apart", "wrong"), [(0.5, []), (0.5001, [0])])
def test_a_spread_that_is_the_bound_is_within_it(apart: float, wrong: list[int]) -> None:
    """The bound grows with the lowest of the values: 2 of 0.125 each, and 0.25."""
    noise = Noise("told", 0.25, 0.125, 0.1, 0.1)
    spread, bound, found = spreads(*_pairs([-2.0 + apart, -2.0], [-3.0]), noise)
    assert (bound[0], bound[1]) == (0.5, 0.625)
    assert spread.tolist() == [apart, 0.0]
    assert found.tolist() == wrong


def test_half_precision_looks_at_the_mean_of_several_rows_first() -> None:
    """Single rows have no spread and do not count; four times the bound of the mean is far."""
    few = 2 * HALF_NOISE.mean_of(1)  # 0.5
    for apart, wrong in ((few - 1e-6, []), (few + 1e-6, [0])):
        _, bound, found = spreads(*_pairs([-1.0, -1.0 - apart], [-3.0], [-4.0]), HALF_NOISE)
        assert bound.tolist() == [4 * HALF_NOISE.mean] * 3
        assert found.tolist() == wrong
    cells, values = _pairs([-1.0], [-3.0])
    assert spreads(cells, values, HALF_NOISE)[2].tolist() == []


def test_a_spread_of_four_means_is_within_half_precision() -> None:
    noise = Noise("told", None, 0.0, 0.0625, 0.1)
    spread, bound, found = spreads(*_pairs([-1.0, -1.25], [-1.0, -3.0]), noise)
    assert (spread.tolist(), bound.tolist(), found.tolist()) == ([0.25, 2.0], [0.25, 0.25], [1])


def test_values_that_are_not_finite_have_no_spread_and_no_probability() -> None:
    cells, values = _pairs([-1.0, np.nan], [np.inf, -1.0], [-2.0, -2.5])
    spread, _, wrong = spreads(cells, values, FP32)
    assert spread.tolist() == [0.0, 0.0, 0.5]
    assert wrong.tolist() == [2]
    total = prefix_sums(*_pairs([np.nan], [-1.0], [700.0]))
    assert total.max() == pytest.approx(np.exp(50.0))
