"""Public bug reports about the arithmetic of a function: ours gives the right answer, and tells
the reported one apart.

The inputs and both answers are those of ``tests/data/cases/cases.jsonl``, where each case names
its thread. Every case whose ``expect.kind`` is ``function`` has a test of its id here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

from dataproto_audit import check, check_dump, check_union
from dataproto_audit.codes import UsageError
from dataproto_audit.findings import Finding
from dataproto_audit.reference import advantages, kl, losses, masks, sequences
from dataproto_audit.reference.logprobs import label_log_probs
from dataproto_audit.testing.recipes import cook
from dataproto_audit.trainer.batching import balance, fewest_micro_batches
from dataproto_audit.trainer.compare.judge import Values, differences, tolerances, wrong_values
from dataproto_audit.trainer.config import load_config
from dataproto_audit.trainer.validate import validate

FILE = Path(__file__).parents[1] / "data" / "cases" / "cases.jsonl"
FUNCTIONS = {case["id"]: case for case in map(json.loads, FILE.read_text().splitlines())
             if case["expect"]["kind"] == "function"}  # fmt: skip
ROUNDED = 1e-4
"""The answers of the file have four digits."""
CHECKS: dict[str, Callable[[Any, Any, Any], None]] = {}


def answers(case: str) -> Callable[[Callable[[Any, Any, Any], None]], Callable[..., None]]:
    """Register the test of a case, called with its inputs, the right and the reported answer."""

    def register(run: Callable[[Any, Any, Any], None]) -> Callable[..., None]:
        CHECKS[case] = run
        return run

    return register


@pytest.mark.parametrize("case", list(FUNCTIONS))
def test_function(case: str) -> None:
    repro = FUNCTIONS[case]["repro"]
    CHECKS[case](repro.get("inputs", repro), repro.get("expected"), repro.get("wrong"))


def test_every_function_case_has_a_test() -> None:
    assert len(FUNCTIONS) == 27
    assert set(CHECKS) == set(FUNCTIONS)


def f(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def row(values: Any) -> Tensor:
    return f(values).reshape(1, -1)


def ones(rows: int, width: int) -> Tensor:
    return torch.ones(rows, width, dtype=torch.int64)


def near(want: Any) -> Any:
    return pytest.approx(want, abs=ROUNDED)


def told(case: str, found: list[Finding]) -> Finding:
    """The finding that the case asks for: its level, one of its stages and fields."""
    expect = FUNCTIONS[case]["expect"]
    return next(one for one in found
                if one.severity == expect["level"] and one.stage in expect["stages"]
                and one.field in expect["fields"])  # fmt: skip


# -- sizes -----------------------------------------------------------------------------------------


def rows_of(name: str, rows: int) -> dict[str, Any]:
    return {"batch": {name: np.zeros((rows, 2), np.float32)}}


@answers("B011")
def gathered_over_the_model_parallel_group(given: Any, right: Any, wrong: Any) -> None:
    rewards = rows_of("token_level_scores", given["rewards_len"])
    config = {"tp_size": given["model_parallel"]}
    assert check_union(rewards, rows_of("kl", right["kl_len"]), config=config).ok
    [finding] = check_union(rewards, rows_of("kl", wrong["kl_len"]), config=config).findings
    assert finding.code == "DPA114"
    assert finding.causes[0] == "gathered_twice"
    assert "24 = tp·6" in finding.evidence["explained"]


@answers("B065")
def cut_over_the_sequence_parallel_group(given: Any, right: Any, wrong: Any) -> None:
    logits = rows_of("logits", given["logits_rows"])
    config = {"sp_size": given["sp"]}
    good = rows_of("temperatures", right["temperature_rows"])
    assert check_union(logits, good, config=config).ok
    bad = rows_of("temperatures", wrong["temperature_rows"])
    [finding] = check_union(logits, bad, config=config).findings
    assert "24 = sp·3" in finding.evidence["explained"]


@answers("B061")
def a_second_models_log_probs_of_the_whole_row(given: Any, right: Any, wrong: Any) -> None:
    def batch(width: int) -> dict[str, Any]:
        one, two = (np.full((1, w), -0.5, np.float32) for w in (given["student_len"], width))
        ids = np.full((1, given["student_len"]), 7)
        return {"batch": {"responses": ids, "old_log_probs": one, "ref_log_prob": two}}

    def sizes(width: int) -> list[Finding]:
        report = check(batch(width), "ref_log_prob", config={"cp_size": given["cp"]})
        return [finding for finding in report.findings if finding.code == "DPA103"]

    assert not sizes(right["teacher_len"])
    [finding] = sizes(wrong["teacher_len"])
    assert finding.field == "ref_log_prob"
    assert "10 = 5 x cp" in str(finding.evidence)


@answers("B110")
def the_ragged_axis_is_that_of_the_tokens(given: Any, right: Any, wrong: Any) -> None:
    _, channels, total = given["shape"]

    def named(axis: int) -> set[str]:
        ids = {name: torch.nested.nested_tensor_from_jagged(
            torch.arange(size), offsets=torch.tensor([0, size])
        ) for name, size in (("prompts", 5), ("responses", 3), ("input_ids", total))}  # fmt: skip
        size = total if axis == 2 else channels
        ids["position_ids"] = torch.nested.nested_tensor_from_jagged(
            torch.arange(total).repeat(channels, 1),
            offsets=torch.tensor([0, size]), jagged_dim=axis,
        )  # fmt: skip
        report = check({"batch": ids}, "old_log_prob")
        return {one.field for one in report.findings if one.code == "DPA103"}

    assert named(right["ragged_idx"]) == set()
    assert named(given["ragged_idx"]) == {"position_ids"}
    assert wrong["split_sizes"] == [channels]


@answers("B112")
def every_field_of_a_packed_pass_is_packed(given: Any, right: Any, wrong: Any) -> None:
    channels, rows, total = given["position_ids_shape"]
    attention = ones(rows, total)
    attention[0, :3] = 0  # 13 attended tokens
    ids = sequences.packed(torch.arange(rows * total).reshape(rows, total), attention)
    positions = torch.arange(channels * rows * total).reshape(channels, rows, total)
    packed = sequences.packed(positions, attention)
    assert list(ids.shape) == given["input_ids_shape"]
    assert list(packed.shape) == right["position_ids_shape"]
    assert list(positions.shape) == wrong["position_ids_shape"]
    assert packed.shape[-1] == ids.shape[-1] != positions.shape[-1]
    assert sequences.packed_offsets(attention).tolist() == [0, 5, 13]


@answers("B015")
def one_advantage_a_row_is_a_column(given: Any, right: Any, wrong: Any) -> None:
    [rows] = given["advantages_shape"]
    advantage, old, mask = f([-1.0] * rows), torch.zeros(rows, rows), ones(rows, rows)
    keep = sequences.off_policy_keep(advantage[:, None], old, old - 1, mask, threshold=0.5)
    assert list(keep.shape) == right["keep_mask_shape"]
    assert not keep.any()
    assert list((advantage >= 0) | (advantage[:, None] >= 0)) != right["keep_mask_shape"]
    square = (advantage >= 0) | keep
    assert list(square.shape) == wrong["keep_mask_shape"]
    with pytest.raises(TypeCheckError, match="advantages"):
        sequences.off_policy_keep(advantage, old, old - 1, mask, threshold=0.5)


@answers("B014")
def entropy_of_another_rank_than_the_mask(given: Any, right: Any, wrong: Any) -> None:
    entropy, mask = f(given["entropy"]), torch.tensor(given["mask"])
    mean = losses.aggregate(entropy[:, None], mask, "token-mean")
    assert float(mean) == near(right["masked_mean"])
    assert float((entropy * mask).sum() / mask.sum()) == near(wrong["masked_mean"])
    with pytest.raises(TypeCheckError, match="values"):
        losses.aggregate(entropy, mask, "token-mean")


# -- the loss and its divisor ----------------------------------------------------------------------


@answers("B027")
def the_divisor_counts_after_all_masks(given: Any, right: Any, wrong: Any) -> None:
    counts = torch.tensor(given["token_counts"])
    full = masks.mask_of_lengths(counts, 5)
    kept = full.clone()
    kept[given["truncated_row"]] = False
    values = torch.full(kept.shape, given["loss_per_token"], dtype=torch.float64)
    assert float(losses.aggregate(values, kept, "token-mean")) == near(right["loss"])
    before = losses.count_normaliser(full, "token-mean")
    diluted = losses.aggregate(values, kept, "token-mean", normaliser=before)
    assert float(diluted) == near(wrong["loss"])
    assert losses.count_normaliser(kept, "token-mean") == 15 != before


@answers("B095")
def the_mean_leaves_padding_out(given: Any, right: Any, wrong: Any) -> None:
    values, mask = f(given["kl"]), torch.tensor(given["mask"])
    assert float(losses.aggregate(values, mask, "token-mean")) == near(right["masked_mean"])
    plain = losses.aggregate(values, torch.ones_like(mask), "token-mean")
    assert float(plain) == near(wrong["plain_mean"])


@answers("B096")
def micro_batches_weigh_by_their_tokens(given: Any, right: Any, wrong: Any) -> None:
    parts = given["micro_batches"]
    total = sum(part["tokens"] for part in parts)

    def shares(weigh: Callable[[Any], float]) -> float:
        return float(sum(
            losses.aggregate(row([part["loss_sum"] / part["tokens"]] * part["tokens"]),
                             ones(1, part["tokens"]), "token-mean", normaliser=weigh(part))
            for part in parts
        ))  # fmt: skip

    assert shares(lambda part: total) == near(right["loss"])
    samples = sum(part["samples"] for part in parts)
    by_sample = shares(lambda part: part["tokens"] * samples / part["samples"])
    assert by_sample == near(wrong["loss"])


@answers("B097")
def accumulated_losses_are_shares_of_one(given: Any, right: Any, wrong: Any) -> None:
    each, count = given["micro_losses"], len(given["micro_losses"])
    shares = [losses.aggregate(row([loss]), ones(1, 1), "token-mean", normaliser=count)
              for loss in each]  # fmt: skip
    assert float(sum(shares)) == near(right["loss"])
    whole = losses.aggregate(row(each), ones(1, count), "token-mean")
    assert float(sum(shares)) == pytest.approx(float(whole))
    added = sum(losses.aggregate(row([loss]), ones(1, 1), "token-mean") for loss in each)
    assert float(added) == near(wrong["loss"])


@answers("B099")
def a_constant_divides_and_rows_are_averaged(given: Any, right: Any, wrong: Any) -> None:
    width, rows = given["width"], len(given["seq_sums"])
    values = f(given["seq_sums"])[:, None].expand(rows, width) / width
    mode = "seq-mean-token-sum-norm"
    assert float(losses.aggregate(values, ones(rows, width), mode)) == near(right["loss"])
    halves = [losses.aggregate(values[part], ones(2, width), mode, normaliser=rows)
              for part in (slice(0, 2), slice(2, 4))]  # fmt: skip
    assert float(sum(halves)) == near(right["loss"])
    summed = losses.aggregate(values, ones(rows, width), "token-sum") / width
    assert float(summed) == near(wrong["loss_mb4"])


@answers("B100")
def a_mini_batch_holds_whole_micro_batches(given: Any, right: Any, wrong: Any) -> None:
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

    def planned(micro: int) -> None:
        mini = given["mini"]
        validate(load_config("quickstart", [
            f"data.train_batch_size={mini}", f"{actor}.ppo_mini_batch_size={mini}",
            f"{rollout}.n=2", "trainer.n_gpus_per_node=2",
            f"{actor}.ppo_micro_batch_size_per_gpu={micro}",
        ]))  # fmt: skip

    planned(given["mini"])
    assert given["mini"] // given["mini"] == right["accum_steps_min"]
    assert given["mini"] // given["micro_per_gpu"] == wrong["accum_steps"]
    with pytest.raises(UsageError, match="ppo_micro_batch_size_per_gpu=8") as caught:
        planned(given["micro_per_gpu"])
    assert caught.value.code == "DPA854"


# -- two layouts of one step -----------------------------------------------------------------------


def step_of(loss: float, slope: float) -> Values:
    one = f([[-0.7, -0.7]])
    weight = {"weight": f([slope])}
    return Values(one, one.abs(), {"pg_loss": loss, "total": loss}, weight, weight)


NOISE = {"max_abs_logprob_diff": 1e-7, "max_abs_entropy_diff": 1e-7, "rel_loss_diff": 1e-7,
         "max_abs_grad_diff": 1e-7, "rel_update_diff": 1e-7}  # fmt: skip


def beyond(ours: Values, expected: Values) -> tuple[dict[str, Any], list[str]]:
    found = differences(ours, expected)
    largest = float(expected.gradients["weight"].abs().max())
    return found, wrong_values(found, tolerances(NOISE, largest_gradient=largest))


@answers("B062")
def a_loss_that_was_reduced_twice(given: Any, right: Any, wrong: Any) -> None:
    fsdp, megatron = (step_of(given[f"{name}_loss"], 1.0) for name in ("fsdp", "megatron"))
    assert beyond(fsdp, fsdp)[1] == []
    found, names = beyond(megatron, fsdp)
    assert names == ["rel_loss_diff"]
    assert found["rel_loss_diff"] == near(wrong["ratio"] - right["ratio"])
    assert wrong["ratio"] == given["cp"]


@answers("B078")
def equal_log_probs_and_other_gradients(given: Any, right: Any, wrong: Any) -> None:
    one, two = (step_of(1.0, given[f"grad_norm_tp{tp}"]) for tp in (1, 2))
    found, names = beyond(two, one)
    assert found["max_abs_logprob_diff"] == 0 == given["logprob_tp1"] - given["logprob_tp2"]
    assert names == ["max_abs_grad_diff", "rel_update_diff"]
    ratio = given["grad_norm_tp2"] / given["grad_norm_tp1"]
    assert ratio == pytest.approx(wrong["grad_norm_ratio"], abs=1e-3) != right["grad_norm_ratio"]


# -- advantages ------------------------------------------------------------------------------------


@answers("B043")
def one_quantity_for_score_and_baseline(given: Any, right: Any, wrong: Any) -> None:
    corrected, mask, uid = f(given["corrected"])[:, None], ones(3, 1), ["a", "a", "a"]
    made, _ = advantages.grpo(corrected, mask, uid, norm_by_std=False)
    assert made[:, 0].tolist() == near(right["adv"])
    assert float(made.sum()) == near(right["sum"])
    mixed = corrected[:, 0] - f(given["raw"]).mean()
    assert mixed.tolist() == near(wrong["adv"])
    assert float(mixed.sum()) == near(wrong["sum"])


@answers("B053")
def only_the_best_row_of_a_group(given: Any, right: Any, wrong: Any) -> None:
    scores, mask = f(given["scores"])[:, None], ones(3, 1)
    made, _ = advantages.grpo_passk(scores, mask, ["a", "a", "a"], norm_by_std=False)
    assert made[:, 0].tolist() == near(right["adv"])
    assert made[:, 0].tolist() != near(wrong["adv"])


@answers("B101")
def gae_passes_over_tool_tokens(given: Any, right: Any, wrong: Any) -> None:
    batch = cook(given["base"], [])["batch"]
    at = slice(given["row"], given["row"] + 1)
    rewards, values = (f(np.asarray(batch[name])[at])
                       for name in ("token_level_rewards", "values"))  # fmt: skip
    mask = torch.as_tensor(np.asarray(batch["response_mask"]))[at]
    attended = torch.as_tensor(np.asarray(batch["attention_mask"]))[at, -mask.shape[1] :]
    steps = {"gamma": given["gamma"], "lam": given["lam"], "whitened": False}
    made, _ = advantages.gae(rewards, values, mask, **steps)
    assert made[0].tolist() == near(given["advantages_right"])
    over_all, _ = advantages.gae(rewards, values, attended, **steps)
    assert over_all[0].tolist() == near(given["advantages_wrong"])
    noise = torch.where(mask == 0, torch.full_like(values, 50.0), values)
    assert advantages.gae(rewards, noise, mask, **steps)[0].tolist() == made.tolist()
    assert (right, wrong) == (None, "all tokens")


@answers("B104")
def a_mask_of_ones_over_padding(given: Any, right: Any, wrong: Any) -> None:
    rewards, mask = row(given["token_rewards"]), torch.tensor([given["true_mask"]])
    made = advantages.rewards_to_go(rewards, mask, gamma=given["gamma"])
    assert made[0].tolist() == near(right["adv"])
    everything = torch.tensor([wrong["mask"]])
    leaking = advantages.rewards_to_go(rewards, everything, gamma=given["gamma"])
    assert leaking[0].tolist() == near(wrong["adv"])
    attention = torch.cat([ones(1, 2), mask], 1)
    assert (
        masks.expected_response_mask(masks.response_attention(attention, 4)).int().equal(mask.int())
    )
    fields = {"prompts": ones(1, 2), "responses": ones(1, 4) * 3, "attention_mask": attention,
              "response_mask": everything}  # fmt: skip
    finding = told("B104", check({"batch": fields}, "rollout").findings)
    assert finding.columns == {0: (2, 3)}


# -- log-probs and tokens --------------------------------------------------------------------------


@answers("B058")
def labels_stay_in_their_sequence(given: Any, right: Any, wrong: Any) -> None:
    ids, offsets = torch.tensor(given["packed"]), torch.tensor(given["cu_seqlens"])
    labels = masks.packed_labels(ids, offsets)
    assert labels.tolist() == [-100 if label is None else label for label in right["labels"]]
    rolled = ids.roll(-1)
    assert rolled.tolist() == wrong["labels"]
    assert (labels != rolled).nonzero()[:, 0].tolist() == [2, 4, 6]


@answers("B072")
def the_next_turn_begins_with_this_one(given: Any, right: Any, wrong: Any) -> None:
    turn, later = given["turn1_prompt_plus_response"], given["turn2_prompt"]
    assert sequences.first_break(turn, later) == wrong["first_mismatch_index"]
    assert (sequences.first_break(turn, [*turn, 21]) is None) == right["prefix_ok"]
    assert sequences.first_break(turn, turn[:3]) == 3


@answers("B087")
def entropy_is_that_of_the_sampled_distribution(given: Any, right: Any, wrong: Any) -> None:
    logits, label = f(given["logits"]).reshape(1, 1, -1), torch.zeros(1, 1, dtype=torch.int64)
    _, entropy = label_log_probs(logits, label, temperature=given["T"])
    assert float(entropy) == pytest.approx(right["entropy"], abs=5e-4)
    _, unscaled = label_log_probs(logits, label)
    assert float(unscaled) == pytest.approx(wrong["entropy"], abs=5e-4)


@answers("B090")
def the_logged_kl_is_the_one_of_the_loss(given: Any, right: Any, wrong: Any) -> None:
    old, ref = row(given["old"]), row(given["ref"])
    assert float(kl.kl_estimate(old, ref, "abs").mean()) == near(right["kl_abs_mean"])
    logged = float(kl.kl_estimate(old, ref, "k1").mean())
    assert logged == near(wrong["kl_logged_k1_mean"])


# -- balancing and cutting -------------------------------------------------------------------------


@answers("B106")
def rows_cannot_be_split_over_bins(given: Any, right: Any, wrong: Any) -> None:
    lengths, cap = np.array(given["lens"]), given["cap"]
    bins = fewest_micro_batches(lengths, limit=cap)
    assert len(bins) == right["bins"]
    assert max(int(lengths[rows].sum()) for rows in bins) == right["max_bin"] <= cap
    assert -(-int(lengths.sum()) // cap) == wrong["bins"]
    rank = {"rank": 0, "rows": 5, "tokens": 30, "micro_batches": [12, 12, 6],
            "indices": [[0, 1], [2, 3], [4]], "token_limit": cap,
            "peak_token_sum": wrong["max_bin"]}  # fmt: skip
    fields = {"responses": ones(5, 3), "response_mask": ones(5, 3),
              "attention_mask": ones(5, 6)}  # fmt: skip
    report = check({"batch": fields, "meta_info": {"ranks": [rank]}}, "update_actor")
    assert "DPA704" in {finding.code for finding in report.findings}


@answers("B107")
def work_is_counted_in_64_bits(given: Any, right: Any, wrong: Any) -> None:
    lengths = torch.tensor([given["len"]], dtype=getattr(torch, given["dtype"]))
    assert sequences.attention_work(lengths).tolist() == [right["len_sq"]]
    # The file's number for the overflow, -2147479015, is that of 46341^2 - 2^32.
    assert int((lengths * lengths)[0]) == wrong["len_sq_int32"] < 0
    long = np.full(8, given["len"], np.int32)
    assert sorted(balance(long, ranks=2).tolist()) == list(range(8))


# -- dumps -----------------------------------------------------------------------------------------


def lines(rows: int, *names: str) -> dict[str, Any]:
    return {"non_tensor_batch": {name: np.array([f"{name} {i}" for i in range(rows)], object)
                                 for name in names}}  # fmt: skip


@answers("B123")
def lines_that_no_request_can_be_told_of(given: Any, right: Any, wrong: Any) -> None:
    keys = given["jsonl_keys"]
    held = lines(2, *keys, right["jsonl_has"])
    assert check_dump(held, held).ok
    assert not check_dump(held, held).findings
    report = check_dump(held, lines(2, *keys))
    assert told("B123", report.findings).code == "DPA107"
    assert report.ok
    assert wrong["jsonl_has"] is None


@answers("B124")
def ranks_that_wrote_over_each_other(given: Any, right: Any, wrong: Any) -> None:
    held = lines(given["rollout_rows"], "uid")
    config = {"world_size": given["dp"]}
    assert not check_dump(held, lines(right["rows"], "uid"), config=config).findings
    finding = told("B124", check_dump(held, lines(wrong["rows"], "uid"), config=config).findings)
    assert finding.evidence["explained"] == "6 = 3 x dp (dp=2)"
