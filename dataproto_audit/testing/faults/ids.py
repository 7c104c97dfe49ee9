"""Faults of token ids, positions and the end of a response."""

from __future__ import annotations

import numpy as np
import torch

from dataproto_audit.testing.faults.registry import Truth, seeded
from dataproto_audit.testing.faults.scene import Scene, cells, rows_of
from dataproto_audit.testing.toy_policy import PAD, STOP

SINGLE = ("plain", "unbalanced", "long")
RESPONSE_SIDE = ("responses", "input_ids", "attention_mask", "position_ids", "response_mask",
                 "rollout_log_probs")  # fmt: skip


def _responses(scene: Scene, new: torch.Tensor) -> Truth:
    """Write responses, and the input ids that go with them."""
    width = scene.tensors["prompts"].shape[1]
    scene.tensors["input_ids"] = torch.cat([scene.tensors["input_ids"][:, :width], new], 1)
    return scene.put("responses", new)


@seeded("rollout", "responses", "rollout_log_probs", "old_log_probs",
        cause=("forced_token", "wrong_stop_token"), stages=("old_log_prob",), bases=SINGLE,
        origin=("B032",))  # fmt: skip
def stop_token_forced(scene: Scene) -> Truth:
    """The last token of responses at the limit is overwritten with a stop token."""
    new = scene.tensors["responses"].clone()
    new[scene.lengths() == new.shape[1], -1] = STOP
    truth = _responses(scene, new)
    truth.also = tuple(Truth(name, truth.rows, truth.columns)
                       for name in ("rollout_log_probs", "old_log_probs"))  # fmt: skip
    return truth


@seeded("rollout", "responses", "input_ids", "finish_reason",
        cause=("wrong_stop_token", "silent_truncation"), bases=SINGLE,
        origin=("B025",))  # fmt: skip
def engine_stops_elsewhere(scene: Scene) -> Truth:
    """The engine stops at an id that the trainer does not know as a stop token."""
    new, rows = scene.tensors["responses"].clone(), scene.short()
    new[rows, scene.lengths()[rows] - 1] = 11
    return _responses(scene, new)


@seeded("rollout", "responses", "attention_mask", cause=("silent_truncation", "wrong_stop_token"),
        bases=SINGLE)  # fmt: skip
def response_cut_silently(scene: Scene) -> Truth:
    """A length check drops the end of some responses, the stop token with it."""
    rows = scene.long(3)[::2]
    rows = rows[scene.lengths()[rows] < scene.tensors["responses"].shape[1]]
    width, last = scene.tensors["prompts"].shape[1], scene.lengths() - 1
    for name, offset, value in (
        ("responses", 0, PAD), ("response_mask", 0, 0), ("rollout_log_probs", 0, 0),
        ("input_ids", width, PAD), ("attention_mask", width, 0),
    ):  # fmt: skip
        new = scene.tensors[name].clone()
        new[rows, last[rows] + offset] = value
        scene.tensors[name] = new
    attention = scene.tensors["attention_mask"]
    scene.tensors["position_ids"] = (attention.cumsum(1) - 1).clamp(min=0)
    return rows_of("responses", rows.numpy())


@seeded("rollout", "responses", "finish_reason", cause=("wrong_stop_token", "engine_setting"),
        bases=SINGLE)  # fmt: skip
def stop_token_ignored(scene: Scene) -> Truth:
    """The engine generates on after the stop token, to the limit."""
    rows, width = scene.short(), scene.tensors["prompts"].shape[1]
    after = ~scene.attended()
    after[[row for row in range(len(after)) if row not in set(rows.tolist())]] = False
    more = torch.from_numpy(scene.random.integers(3, scene.options.vocab, after.shape))
    _responses(scene, torch.where(after, more, scene.tensors["responses"]))
    for name in ("response_mask", "attention_mask"):
        new = scene.tensors[name].clone()
        new[:, -after.shape[1] :][after] = 1
        scene.tensors[name] = new
    attention = scene.tensors["attention_mask"]
    scene.tensors["position_ids"] = (attention.cumsum(1) - 1).clamp(min=0)
    used = attention[:, :width].numpy() != 0
    scored = scene.run.engine.score(_hashes(scene, used), scene.tensors["responses"].numpy())[0]
    log_probs = torch.from_numpy(scored).float()
    scene.tensors["rollout_log_probs"] = torch.where(scene.trained(), log_probs, 0.0)
    return rows_of("responses", rows.numpy())


def _hashes(scene: Scene, used: np.ndarray) -> np.ndarray:
    from dataproto_audit.testing.toy_policy import prompt_hash

    return prompt_hash(scene.tensors["prompts"].numpy(), used)


@seeded("rollout", "input_ids", "responses", cause=("row_permutation", "stale_buffer"))
def input_ids_of_another_sample(scene: Scene) -> Truth:
    """input_ids were joined before the samples of a prompt were put in order."""
    n, old = scene.options.n, scene.tensors["input_ids"]
    order = np.arange(len(old)).reshape(-1, n)[:, ::-1].reshape(-1).copy()
    return scene.put("input_ids", old[torch.from_numpy(order)])


@seeded("rollout", "input_ids", "responses", cause="shift")
def start_token_twice(scene: Scene) -> Truth:
    """Joining prompt and response adds a start token: the response part is one column late."""
    old, width = scene.tensors["input_ids"], scene.tensors["prompts"].shape[1]
    new = old.clone()
    new[:, width + 1 :] = old[:, width:-1]
    new[:, width] = 1
    return scene.put("input_ids", new)


@seeded(
    "rollout",
    "input_ids",
    "responses",
    cause=("stale_buffer", "row_permutation"),
    origin=("B072",),
    tuned=True,
)
def responses_decoded_again(scene: Scene) -> Truth:
    """Responses are text encoded again; input_ids still hold the sampled ids."""
    old, rows = scene.tensors["responses"], scene.long(3)[::3]
    new = old.clone()
    new[rows, 1] = (old[rows, 1] + 1).clamp(min=3) % scene.options.vocab
    new[rows, 1] = new[rows, 1].clamp(min=3)
    truth = scene.put("responses", new)
    width = scene.tensors["prompts"].shape[1]
    whole = {row: tuple(width + c for c in found) for row, found in truth.columns.items()}
    truth.also = (Truth("input_ids", truth.rows, whole),)
    return truth


@seeded("rollout", "input_ids", "responses", cause="stale_buffer")
def padding_not_cleared(scene: Scene) -> Truth:
    """Padding slots hold ids of an earlier, longer batch."""
    new = torch.where(scene.attended(), scene.tensors["responses"], 7)
    truth = _responses(scene, new)
    width = scene.tensors["prompts"].shape[1]
    whole = {row: tuple(width + c for c in found) for row, found in truth.columns.items()}
    truth.also = (Truth("input_ids", truth.rows, whole),)
    return truth


@seeded("rollout", "responses", "input_ids", cause=("stale_buffer", "left_right_padding"))
def ignore_index_in_ids(scene: Scene) -> Truth:
    """Padding slots hold the loss's ignore index -100, which no embedding has."""
    truth = _responses(scene, torch.where(scene.attended(), scene.tensors["responses"], -100))
    width = scene.tensors["prompts"].shape[1]
    whole = {row: tuple(width + c for c in found) for row, found in truth.columns.items()}
    truth.also = (Truth("input_ids", truth.rows, whole),)
    return truth


@seeded("rollout", "responses", cause=("same_seed", "engine_setting"),
        bases=("long", "lopsided"), origin=("B055",))  # fmt: skip
def one_seed_for_a_group(scene: Scene) -> Truth:
    """Every sample of a prompt gets the same seed, so the group is one response n times."""
    first = torch.arange(len(scene.batch)) // scene.options.n * scene.options.n
    for name in RESPONSE_SIDE:
        scene.tensors[name] = scene.tensors[name][first]
    scene.arrays["finish_reason"] = scene.arrays["finish_reason"][first.numpy()]
    return Truth("responses")  # a short response may be sampled twice in good health


@seeded("rollout", "responses", cause=("same_seed", "engine_setting"),
        bases=("long", "lopsided"), origin=("B056",))  # fmt: skip
def one_seed_for_all_ranks(scene: Scene) -> Truth:
    """Ranks sample with the same seed: the second half of each group repeats the first."""
    n, rows = scene.options.n, torch.arange(len(scene.batch))
    first = rows // n * n + (rows % n) % (n // 2)
    for name in RESPONSE_SIDE:
        scene.tensors[name] = scene.tensors[name][first]
    scene.arrays["finish_reason"] = scene.arrays["finish_reason"][first.numpy()]
    return Truth("responses")


def _positions(scene: Scene, new: torch.Tensor) -> Truth:
    """Positions on padding are free, so only attended cells are wrong for sure."""
    old = scene.tensors["position_ids"]
    everywhere = cells("position_ids", new != old)
    attended = scene.tensors["attention_mask"] != 0
    truth = scene.put("position_ids", new, within=attended)
    truth.also = (everywhere,)
    return truth


@seeded("rollout", "position_ids", cause="wrong_position_ids", stages=("old_log_prob",),
        origin=("B068",))  # fmt: skip
def positions_count_padding(scene: Scene) -> Truth:
    """Positions count from the first column, padding included."""
    old = scene.tensors["position_ids"]
    return _positions(scene, torch.arange(old.shape[1]).expand_as(old).clone())


@seeded("rollout", "position_ids", cause="wrong_position_ids", tuned=True)
def positions_start_again(scene: Scene) -> Truth:
    """Positions of the response start again at 0."""
    new, width = scene.tensors["position_ids"].clone(), scene.tensors["prompts"].shape[1]
    new[:, width:] -= new[:, width : width + 1]
    return _positions(scene, new)


@seeded("rollout", "position_ids", cause="wrong_position_ids", tuned=True)
def positions_from_one(scene: Scene) -> Truth:
    """Positions are the running count of the mask without taking one off."""
    return _positions(scene, scene.tensors["attention_mask"].cumsum(1))


@seeded("rollout", "position_ids", cause=("wrong_position_ids", "wrong_width"),
        stages=("old_log_prob",), bases=("channels",), origin=("B108",))  # fmt: skip
def position_channel_missing(scene: Scene) -> Truth:
    """The text channel of multimodal positions is missing: the next one takes its place."""
    scene.tensors["position_ids"] = scene.tensors["position_ids"][:, 1:]
    return Truth("position_ids")


@seeded("rollout", "position_ids", cause=("text_positions", "wrong_position_ids"),
        stages=("old_log_prob",), bases=("images",), origin=("B113",))  # fmt: skip
def image_counted_like_text(scene: Scene) -> Truth:
    """The packed path uses the text's positions on all axes of an image."""
    old = scene.tensors["position_ids"]
    new = old[:, :1].expand_as(old).clone()
    scene.tensors["position_ids"] = new
    attended = scene.tensors["attention_mask"] != 0
    return cells("position_ids", (new != old).any(1) & attended)


@seeded("rollout", "mm_token_type_ids", cause=("left_right_padding", "shift"),
        stages=("prompts",), bases=("images",), origin=("B114",))  # fmt: skip
def token_types_padded_right(scene: Scene) -> Truth:
    """Token types are padded on the right, the prompts that they describe on the left."""
    width, old = scene.tensors["prompts"].shape[1], scene.tensors["mm_token_type_ids"]
    used = scene.tensors["attention_mask"][:, :width].sum(1)
    new = old.clone()
    order = (torch.arange(width)[None] + width - used[:, None]) % width
    new[:, :width] = old[:, :width].gather(1, order)
    truth = scene.put("mm_token_type_ids", new)
    attended = scene.tensors["attention_mask"] != 0
    truth.also = (cells("mm_token_type_ids", (new != old) & attended),)
    return truth


@seeded("rollout", "prompts", "uid", "prompt_ids", "raw_prompt", "rows", "", "responses",
        cause="row_permutation", stages=("union",), tuned=True)  # fmt: skip
def responses_in_order_of_completion(scene: Scene) -> Truth:
    """Rows come back in the order in which they finished, not in which they were asked for."""
    order = torch.argsort(scene.lengths(), stable=True)
    old = scene.tensors["prompts"]
    for name in list(scene.tensors.keys()):
        scene.tensors[name] = scene.tensors[name][order]
    scene.arrays["finish_reason"] = scene.arrays["finish_reason"][order.numpy()]
    return rows_of("prompts", (scene.tensors["prompts"] != old).any(1).numpy())


@seeded("rollout", "responses", "input_ids", cause=("wrong_dtype", "field_overwritten"),
        bases=SINGLE)  # fmt: skip
def ids_through_a_small_int(scene: Scene) -> Truth:
    """Some ids went through an int8 with an offset and came back negative."""
    new, rows = scene.tensors["responses"].clone(), scene.long(2)[::3]
    new[rows, 0] -= 128
    truth = _responses(scene, new)
    width = scene.tensors["prompts"].shape[1]
    shifted = {row: tuple(c + width for c in columns) for row, columns in truth.columns.items()}
    truth.also = (Truth("input_ids", truth.rows, shifted),)
    return truth


@seeded("rollout", "responses", "input_ids", cause=("wrong_dtype", "field_overwritten"),
        bases=SINGLE)  # fmt: skip
def ids_of_another_tokenizer(scene: Scene) -> Truth:
    """Added tokens of a larger tokenizer: ids that the model has no embedding for."""
    new, rows = scene.tensors["responses"].clone(), scene.long(2)[::4]
    new[rows, 0] = scene.options.vocab + torch.arange(len(rows))
    truth = _responses(scene, new)
    width = scene.tensors["prompts"].shape[1]
    shifted = {row: tuple(c + width for c in columns) for row, columns in truth.columns.items()}
    truth.also = (Truth("input_ids", truth.rows, shifted),)
    return truth
