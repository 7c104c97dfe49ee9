"""Faults of response masks and attention masks."""

from __future__ import annotations

import torch

from dataproto_audit.reference.advantages import grpo
from dataproto_audit.testing.faults.registry import Truth, seeded
from dataproto_audit.testing.faults.scene import Scene, cells, moved, rows_of
from dataproto_audit.testing.toy_policy import PAD

MULTI = ("tools", "critic_tools", "recorded_tools")
Columns = dict[int, tuple[int, ...]]
NO_TOOLS = ("plain", "unbalanced", "long")


@seeded("rollout", "response_mask", cause="mask_on_padding", origin=("B104",))
def mask_all_ones(scene: Scene) -> Truth:
    """The mask is built from a sentinel that the ids never hold, so it is one everywhere."""
    return scene.put("response_mask", torch.ones_like(scene.tensors["response_mask"]))


@seeded("rollout", "response_mask", "rollout_log_probs", cause=("mask_on_tool", "mask_on_padding"),
        stages=("old_log_prob",), bases=MULTI, origin=("B020", "B028"), tuned=True)  # fmt: skip
def tool_tokens_trained(scene: Scene) -> Truth:
    """Tool output spliced into the response counts as the policy's own tokens."""
    return scene.put("response_mask", scene.attended().long())


@seeded("rollout", "response_mask", "rollout_log_probs", cause="mask_hole", bases=MULTI,
        origin=("B021",), tuned=True)  # fmt: skip
def earlier_turn_not_trained(scene: Scene) -> Truth:
    """Only the last turn is trained on; sampled tokens of earlier turns have mask 0."""
    mask, attended = scene.tensors["response_mask"].clone(), scene.attended()
    for row in range(len(mask)):
        tools = torch.nonzero(attended[row] & (mask[row] == 0)).squeeze(1)
        if len(tools) and mask[row, int(tools[-1]) :].any():
            mask[row, : int(tools[-1])] = 0
    return scene.put("response_mask", mask)


@seeded("rollout", "response_mask", "rollout_log_probs", cause=("mask_hole", "shift"),
        bases=NO_TOOLS, origin=("B022",))  # fmt: skip
def first_token_not_trained(scene: Scene) -> Truth:
    """Mask and shifted labels were sliced differently: no row trains its first token."""
    mask = scene.tensors["response_mask"].clone()
    mask[:, 0] = 0
    return scene.put("response_mask", mask)


@seeded("rollout", "response_mask", cause=("mask_hole", "shift"), bases=NO_TOOLS)
def stop_token_not_trained(scene: Scene) -> Truth:
    """The mask ends one token early: the stop token is never learnt."""
    mask = scene.tensors["response_mask"].clone()
    mask[torch.arange(len(mask)), scene.lengths() - 1] = 0
    return scene.put("response_mask", mask)


@seeded("rollout", "response_mask", cause="shift", bases=NO_TOOLS, origin=("B067",), tuned=True)
def mask_one_column_late(scene: Scene) -> Truth:
    """The mask is one step off: the first token is left out and the first pad is trained on."""
    return scene.put("response_mask", moved(scene.tensors["response_mask"], 1))


@seeded("rollout", "response_mask", "finish_reason", "responses",
        cause=("wrong_stop_token", "mask_hole"), bases=NO_TOOLS, origin=("B025",),
        tuned=True)  # fmt: skip
def rows_of_another_stop_token_masked(scene: Scene) -> Truth:
    """Rows that end with a stop token other than the tokenizer's count as overlong."""
    responses, rows = scene.tensors["responses"].clone(), scene.short()
    last = scene.lengths() - 1
    responses[rows, last[rows]] = 10
    width = scene.tensors["prompts"].shape[1]
    scene.tensors["responses"] = responses
    scene.tensors["input_ids"] = torch.cat([scene.tensors["input_ids"][:, :width], responses], 1)
    mask = scene.tensors["response_mask"].clone()
    mask[rows] = 0
    truth = scene.put("response_mask", mask)
    ends: Columns = {int(row): (int(last[row]),) for row in rows}
    truth.also = (Truth("responses", tuple(ends), ends), Truth("finish_reason", truth.rows))
    return truth


@seeded(
    "rollout",
    "tool_mask",
    "response_mask",
    cause=("masks_disagree", "mask_hole"),
    bases=MULTI,
    origin=("B026",),
)
def one_of_two_masks_cleared(scene: Scene) -> Truth:
    """Clearing truncated rows changes one of two masks that describe the same tokens."""
    old = scene.tensors["response_mask"]
    scene.tensors["tool_mask"] = old.clone()
    mask = old.clone()
    mask[:2] = 0
    return scene.put("response_mask", mask)


@seeded("rollout", "attention_mask", "response_mask", cause="mask_hole", bases=NO_TOOLS,
        origin=("B031",), tuned=True)  # fmt: skip
def attention_from_ids(scene: Scene) -> Truth:
    """Attention is ids != pad, and the pad id also occurs as content."""
    rows, width = scene.long(3)[::3], scene.tensors["prompts"].shape[1]
    for name, column, value in (
        ("responses", 1, PAD), ("response_mask", 1, 0),
        ("input_ids", width + 1, PAD), ("attention_mask", width + 1, 0),
    ):  # fmt: skip
        new = scene.tensors[name].clone()
        new[rows, column] = value
        scene.tensors[name] = new
    positions = (scene.tensors["attention_mask"].cumsum(1) - 1).clamp(min=0)
    scene.tensors["position_ids"] = positions
    hole: Columns = {int(row): (1,) for row in rows}
    whole: Columns = {int(row): (width + 1,) for row in rows}
    return Truth("attention_mask", tuple(hole), whole,
                 also=(Truth("response_mask", tuple(hole), hole),))  # fmt: skip


@seeded("rollout", "response_mask", "loss", "trained_tokens",
        cause=("empty_mask", "mask_hole", "mask_from_prompt"),
        stages=("update_actor", "advantage"), bases=("plain", "tools", "recorded"),
        origin=("B033", "B036"), tuned=True)  # fmt: skip
def nothing_trained(scene: Scene) -> Truth:
    """A filter leaves no trained token in the whole batch."""
    return scene.put("response_mask", torch.zeros_like(scene.tensors["response_mask"]))


@seeded("advantage", "response_mask",
        cause=("empty_mask", "mask_hole"), stages=("update_actor", "rollout"),
        bases=("corrected_critic",), origin=("B035",))  # fmt: skip
def one_token_left_to_whiten(scene: Scene) -> Truth:
    """Rejection leaves one trained token, of which there is no variance."""
    mask = torch.zeros_like(scene.tensors["response_mask"])
    row, column = torch.nonzero(scene.tensors["response_mask"])[0].tolist()
    mask[row, column] = 1
    scene.put("response_mask", mask)
    scene.tensors["advantages"] = torch.where(mask != 0, float("nan"), 0.0)
    return Truth("response_mask", also=(Truth("advantages", (row,), {row: (column,)}),))


@seeded("rollout", "response_mask", "is_padding", cause="mask_on_padding", bases=("padded_rows",),
        stages=("union", "balance", "update_actor"), origin=("B030",), tuned=True)  # fmt: skip
def filler_rows_trained(scene: Scene) -> Truth:
    """Rows that only fill the batch up have mask 1 and count in the normaliser."""
    fill = torch.from_numpy(scene.arrays["is_padding"].astype(bool))
    mask = torch.where(fill[:, None], scene.attended().long(), scene.tensors["response_mask"])
    return scene.put("response_mask", mask)


@seeded("rollout", "response_mask", cause=("wrong_dtype", "stale_buffer"))
def masks_added(scene: Scene) -> Truth:
    """Two masks are added instead of multiplied: some tokens count twice."""
    mask = scene.tensors["response_mask"].clone()
    mask[::2] *= 2
    return scene.put("response_mask", mask)


@seeded("rollout", "response_mask", cause="mask_from_prompt", tuned=True)
def mask_cut_from_the_front(scene: Scene) -> Truth:
    """The mask is the attention's first columns instead of its last ones."""
    width = scene.tensors["responses"].shape[1]
    return scene.put("response_mask", scene.tensors["attention_mask"][:, :width].clone())


@seeded("advantage", "response_mask", cause=("mask_on_padding", "mask_on_tool"),
        bases=("corrected",))  # fmt: skip
def rejection_grows_the_mask(scene: Scene) -> Truth:
    """The rejection mask replaces the response mask instead of being multiplied with it."""
    old, ones = scene.trained(), torch.ones_like(scene.tensors["response_mask"])
    made = grpo(scene.tensors["token_level_rewards"], ones, scene.arrays["uid"])[0].float()
    scene.tensors["advantages"], scene.tensors["returns"] = made, made.clone()
    truth = scene.put("response_mask", ones)
    truth.also = (cells("response_mask", ~scene.attended()), cells("response_mask", ~old))
    return truth


@seeded("rollout", "attention_mask", "response_mask", "responses", "input_ids",
        cause=("mask_on_padding", "silent_truncation", "wrong_stop_token"))  # fmt: skip
def attention_one_column_long(scene: Scene) -> Truth:
    """Lengths are counted one too high: attention covers the first padding slot."""
    attention, width = scene.tensors["attention_mask"].clone(), scene.tensors["prompts"].shape[1]
    rows, lengths = scene.short(), scene.lengths()
    attention[rows, width + lengths[rows]] = 1
    scene.tensors["position_ids"] = (attention.cumsum(1) - 1).clamp(min=0)
    truth = scene.put("attention_mask", attention)
    columns: Columns = {int(row): (int(lengths[row]),) for row in rows}
    truth.also = (
        Truth("responses", truth.rows, columns),
        Truth("input_ids", truth.rows, truth.columns),
    )
    return truth


@seeded("rollout", "attention_mask", "responses", "prompts", cause="left_right_padding")
def responses_padded_left(scene: Scene) -> Truth:
    """The engine's output is padded on the left, as prompts are."""
    width, prompt = scene.tensors["responses"].shape[1], scene.tensors["prompts"].shape[1]
    lengths, rows = scene.lengths(), torch.arange(len(scene.batch))[:, None]
    order = (torch.arange(width)[None] + lengths[:, None]) % width
    full = torch.cat([torch.arange(prompt).expand(len(lengths), -1), prompt + order], 1)
    for name in ("responses", "response_mask", "rollout_log_probs"):
        scene.tensors[name] = scene.tensors[name][rows, order]
    for name in ("input_ids", "attention_mask"):
        scene.tensors[name] = scene.tensors[name][rows, full]
    attention = scene.tensors["attention_mask"]
    scene.tensors["position_ids"] = (attention.cumsum(1) - 1).clamp(min=0)
    return rows_of("attention_mask", (lengths < width).numpy())


@seeded("rollout", "attention_mask", "prompts", cause="left_right_padding")
def prompts_padded_right(scene: Scene) -> Truth:
    """Prompts are padded on the right, between prompt and response."""
    width = scene.tensors["prompts"].shape[1]
    used = scene.tensors["attention_mask"][:, :width].sum(1)
    columns = torch.arange(scene.tensors["input_ids"].shape[1]).expand(len(used), -1).clone()
    columns[:, :width] = (torch.arange(width)[None] + width - used[:, None]) % width
    rows = torch.arange(len(used))[:, None]
    scene.tensors["prompts"] = scene.tensors["prompts"][rows, columns[:, :width]]
    for name in ("input_ids", "attention_mask"):
        scene.tensors[name] = scene.tensors[name][rows, columns]
    attention = scene.tensors["attention_mask"]
    scene.tensors["position_ids"] = (attention.cumsum(1) - 1).clamp(min=0)
    return rows_of("attention_mask", (used < width).numpy())
