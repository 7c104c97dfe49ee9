"""Faults of structure: rows, merges, shapes, kinds of numbers, meta entries."""

from __future__ import annotations

import numpy as np
import torch

from dataproto_audit.protocol import DataProto
from dataproto_audit.testing.faults.registry import Truth, seeded
from dataproto_audit.testing.faults.scene import Scene, objects, rows_of, unequal, unlike

ROWS = ("batch_size", "rows")
PROMPT_SIDE = ("uid", "raw_prompt", "prompt_ids", "data_source", "reward_model", "extra_info",
               "index")  # fmt: skip


def _taken(batch: DataProto, index: np.ndarray) -> DataProto:
    tensors = {name: tensor[torch.from_numpy(index)] for name, tensor in batch.batch.items()}
    arrays = {name: array[index] for name, array in batch.non_tensor_batch.items()}
    return DataProto.from_dict(tensors, arrays, dict(batch.meta_info))


@seeded("union", "raw_prompt", cause="not_repeated", stages=("rollout",), origin=("B003",))
def raw_prompt_not_repeated(scene: Scene) -> Truth:
    """One non-tensor field keeps the prompts' row count while all others are repeated."""
    scene.arrays["raw_prompt"] = scene.arrays["raw_prompt"][:: scene.options.n]
    return Truth("raw_prompt")


@seeded("union", "uid", *ROWS, *PROMPT_SIDE[1:], cause="not_repeated", origin=("B001",))
def prompt_side_not_repeated(scene: Scene) -> Truth:
    """The generator repeated the prompts, the driver merged its batch without repeating it."""
    for name in PROMPT_SIDE:
        scene.arrays[name] = scene.arrays[name][:: scene.options.n]
    return Truth("uid")


@seeded("rollout", *ROWS, "", "responses", cause="not_repeated", origin=("B002",))
def rollout_ignores_n(scene: Scene) -> Truth:
    """The engine returns one response per prompt, whatever n is."""
    scene.batch = _taken(scene.batch, np.arange(0, len(scene.batch), scene.options.n))
    return Truth("rows")


@seeded(
    "rollout",
    *ROWS,
    "",
    "responses",
    cause=("repeated_twice", "not_repeated", "rows_lost"),
    origin=("B004",),
)
def repeated_on_both_sides(scene: Scene) -> Truth:
    """Driver and engine both repeat by n: n x n rows per prompt."""
    scene.batch = _taken(scene.batch, np.arange(len(scene.batch)).repeat(scene.options.n))
    return Truth("rows")


@seeded("rollout", *ROWS, "", "responses", cause=("rows_lost", "not_repeated"), origin=("B047",))
def aborted_rows_dropped(scene: Scene) -> Truth:
    """Responses that the engine aborted are missing from the output."""
    kept = np.setdiff1d(np.arange(len(scene.batch)), np.arange(1, len(scene.batch), 7))
    scene.batch = _taken(scene.batch, kept)
    return Truth("rows")


@seeded("reward", *ROWS, "", "uid", "responses", cause="rows_lost", stages=("old_log_prob",))
def rows_filtered_in_reward(scene: Scene) -> Truth:
    """The reward stage drops the rows that it could not score."""
    scene.batch = _taken(scene.batch, np.arange(2, len(scene.batch)))
    return Truth("rows")


@seeded("old_log_prob", *ROWS, "", "ranks", cause="rows_lost", origin=("B005",))
def dispatch_padding_kept(scene: Scene) -> Truth:
    """Rows repeated to fill the ranks are not removed after the worker call."""
    more = np.concatenate([np.arange(len(scene.batch)), np.arange(scene.options.ranks)])
    scene.batch = _taken(scene.batch, more)
    return Truth("rows")


@seeded("balance", "rows", "", "uid", "responses", cause="rows_lost", bases=("plain", "long"),
        tuned=True)  # fmt: skip
def balance_index_repeats_a_row(scene: Scene) -> Truth:
    """The reorder index names one row twice and another never."""
    index = np.arange(len(scene.batch))
    index[3] = 4
    scene.batch = _taken(scene.batch, index)
    return Truth("rows", (3,), also=(Truth("rows", (3, 4)), Truth("rows", (4,))))


@seeded("balance", "uid", *PROMPT_SIDE[1:], "prompts", cause="row_permutation",
        bases=("plain", "long"))  # fmt: skip
def only_tensors_balanced(scene: Scene) -> Truth:
    """Balancing reorders the tensors and leaves the non-tensor fields as they were."""
    back = np.argsort(scene.run.order)
    wrong = np.zeros(len(back), bool)
    for name, array in scene.arrays.items():
        scene.arrays[name] = array[back]
        if name == "uid":
            wrong = unlike(array, scene.arrays[name])
    return rows_of("uid", wrong)


@seeded("balance", "rollout_log_probs", cause="row_permutation", stages=("old_log_prob",),
        bases=("plain", "long"))  # fmt: skip
def one_tensor_not_balanced(scene: Scene) -> Truth:
    """One per-token field misses the reorder and keeps the rows of before."""
    old = scene.tensors["rollout_log_probs"]
    back = torch.from_numpy(np.argsort(scene.run.order))
    new = old[back]
    scene.tensors["rollout_log_probs"] = new
    return rows_of("rollout_log_probs", unequal(old, new).any(1).numpy())


@seeded("advantage", "uid", "rows", "", *PROMPT_SIDE[1:], cause="row_permutation",
        where="before_stage", stages=("reward", "old_log_prob", "ref_log_prob"),
        tuned=True)  # fmt: skip
def uids_resorted_on_the_driver(scene: Scene) -> Truth:
    """Code between two stages sorts the uids and forgets the rest of the row."""
    old = scene.arrays["uid"]
    scene.arrays["uid"] = objects(sorted(old.tolist()))
    return rows_of("uid", unlike(old, scene.arrays["uid"]))


@seeded("rollout", "routed_experts", cause="wrong_width", origin=("B010",))
def one_field_not_truncated(scene: Scene) -> Truth:
    """Ids and masks are cut to the limit, the per-token routing is not."""
    rows, width = scene.tensors["input_ids"].shape
    scene.tensors["routed_experts"] = torch.zeros((rows, width + 2, 1, 2), dtype=torch.int64)
    return Truth("routed_experts")


@seeded("values", "values", cause="wrong_width", bases=("critic", "critic_tools"),
        origin=("B066",))  # fmt: skip
def values_of_the_prompt(scene: Scene) -> Truth:
    """The critic slices the prompt's columns instead of the response's."""
    width = scene.tensors["prompts"].shape[1]
    rows = len(scene.batch)
    scene.tensors["values"] = torch.full((rows, width), 0.6)
    return Truth("values")


@seeded("values", "values", cause="field_forgotten", stages=("advantage",),
        bases=("critic", "critic_tools"), origin=("B079",))  # fmt: skip
def values_missing(scene: Scene) -> Truth:
    """A pipeline stage without the value head hands on no values."""
    del scene.tensors["values"]
    return Truth("values")


@seeded("old_log_prob", "old_log_probs", cause="wrong_width", origin=("B061",))
def log_probs_of_the_whole_sequence(scene: Scene) -> Truth:
    """Log-probs come back for prompt and response, unsliced."""
    old = scene.tensors["old_log_probs"]
    width = scene.tensors["prompts"].shape[1]
    scene.tensors["old_log_probs"] = torch.cat([torch.zeros(len(old), width), old.float()], 1)
    return Truth("old_log_probs")


@seeded("old_log_prob", "old_log_probs", cause=("wrong_width", "shift"))
def log_probs_one_column_short(scene: Scene) -> Truth:
    """Next-token log-probs are kept for all columns but the first: one column is missing."""
    scene.tensors["old_log_probs"] = scene.tensors["old_log_probs"][:, 1:]
    return Truth("old_log_probs")


@seeded("advantage", "advantages", cause="wrong_width", origin=("B015",))
def advantages_one_per_row(scene: Scene) -> Truth:
    """Advantages have one number per row and were not spread over the tokens."""
    scene.tensors["advantages"] = scene.tensors["advantages"].amax(1)
    return Truth("advantages")


@seeded("ref_log_prob", "ref_log_prob", "", "rows",
        cause=("gathered_twice", "rows_lost", "wrong_width"), origin=("B011",),
        tuned=True)  # fmt: skip
def gathered_twice(scene: Scene) -> Truth:
    """Every model-parallel rank's copy is gathered, so one field has a multiple of the rows."""
    fields = dict(scene.tensors.items())
    fields["ref_log_prob"] = fields["ref_log_prob"].repeat_interleave(2, 0)
    scene.batch = {"batch": fields, "non_tensor_batch": scene.arrays, "meta_info": scene.meta}
    return Truth("ref_log_prob")


@seeded("rollout", "responses", "input_ids", cause="wrong_dtype")
def ids_as_floats(scene: Scene) -> Truth:
    """Response ids went through a float tensor and were not converted back."""
    scene.tensors["responses"] = scene.tensors["responses"].float()
    return Truth("responses")


@seeded("rollout", "response_mask", cause="wrong_dtype")
def mask_as_floats(scene: Scene) -> Truth:
    """The response mask is a float tensor."""
    scene.tensors["response_mask"] = scene.tensors["response_mask"].float()
    return Truth("response_mask")


@seeded("old_log_prob", "rollout_log_probs", cause=("field_forgotten", "changed_between_stages"),
        where="before_stage", stages=("reward",), origin=("B052",))  # fmt: skip
def sampling_log_probs_dropped(scene: Scene) -> Truth:
    """A path between two stages builds a new batch without the engine's log-probs."""
    del scene.tensors["rollout_log_probs"]
    return Truth("rollout_log_probs")


@seeded("reward", "responses", cause="field_overwritten")
def responses_edited_by_the_reward(scene: Scene) -> Truth:
    """The reward function strips the stop token in place instead of in its own copy."""
    new, last = scene.tensors["responses"].clone(), scene.lengths() - 1
    rows = scene.short()
    new[rows, last[rows]] = 0
    return scene.put("responses", new)


@seeded("update_actor", "response_mask", cause=("changed_between_stages", "field_overwritten"),
        where="before_stage", stages=("advantage", "update_critic"),
        origin=("B027",))  # fmt: skip
def overlong_rows_masked_late(scene: Scene) -> Truth:
    """Truncated rows lose their mask after advantages were computed with it."""
    new = scene.tensors["response_mask"].clone()
    new[scene.lengths() == new.shape[1]] = 0
    return scene.put("response_mask", new)


@seeded("reward", "reward_model", "ground_truth",
        cause=("field_overwritten", "not_repeated", "row_permutation", "reward_rows_shifted"),
        stages=("union",), origin=("B041",))  # fmt: skip
def answers_repeated_twice(scene: Scene) -> Truth:
    """Side columns, repeated already, are repeated by n again and cut to the row count."""
    old = scene.arrays["reward_model"]
    new = old.repeat(scene.options.n)[: len(old)]
    scene.arrays["reward_model"] = new
    return rows_of("reward_model", unlike(old, new))


@seeded("union", "temperature", "meta_info.temperature", "meta_info",
        cause=("meta_lost", "field_forgotten"), stages=("rollout", "balance"),
        origin=("B008",), tuned=True)  # fmt: skip
def meta_lost_in_concat(scene: Scene) -> Truth:
    """Joining worker outputs keeps the meta entries of the first worker only."""
    scene.meta.pop("temperature")
    scene.meta.pop("global_steps")
    return Truth("temperature")


@seeded("ref_log_prob", "micro_batch_size", "meta_info.micro_batch_size",
        cause=("stage_meta_leak", "engine_setting"), stages=("update_actor", "old_log_prob"),
        bases=("recorded",), origin=("B017",))  # fmt: skip
def stage_setting_leaks(scene: Scene) -> Truth:
    """The reference stage leaves its micro-batch size in the meta entries for the update."""
    scene.meta["micro_batch_size"] = 16
    return Truth("micro_batch_size")


@seeded("old_log_prob", "global_token_num", "meta_info.global_token_num",
        cause=("row_permutation", "stage_meta_leak"), where="before_stage",
        stages=("balance", "reward"), bases=("plain", "long"), tuned=True)  # fmt: skip
def token_counts_of_before_the_balance(scene: Scene) -> Truth:
    """Token counts per row were listed before the rows were reordered."""
    back = np.argsort(scene.run.order)
    counts = np.asarray(scene.meta["global_token_num"])
    scene.meta["global_token_num"] = counts[back].tolist()
    return Truth("global_token_num")


@seeded("rollout", "response_mask", "responses", cause="wrong_width")
def mask_of_another_width(scene: Scene) -> Truth:
    """The mask is padded to the longest response of its worker, not to the limit."""
    scene.tensors["response_mask"] = scene.tensors["response_mask"][:, :-1]
    return Truth("response_mask")


@seeded("dispatch", "attention_mask", "cp_size", "tp_size", cause=("short_for_split",
        "wrong_width"), where="start", stages=("old_log_prob",), bases=("recorded",),
        options={"cp_size": 8}, origin=("B063",))  # fmt: skip
def rows_too_short_for_context_parallel(scene: Scene) -> Truth:
    """Some rows have fewer tokens than the context-parallel split needs."""
    return Truth("attention_mask")


@seeded("dispatch", *ROWS, "", "uid", "responses", "ranks", cause=("pad_divisor", "rows_lost"),
        where="before_stage", stages=("balance", "old_log_prob"), bases=("recorded",),
        origin=("B006",), tuned=True)  # fmt: skip
def rows_do_not_divide_over_the_ranks(scene: Scene) -> Truth:
    """Rows are filtered before the dispatch and not filled up to a multiple of the ranks."""
    scene.batch = _taken(scene.batch, np.arange(len(scene.batch) - 1))
    return Truth("rows")
