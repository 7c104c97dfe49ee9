"""Names that belong to formats and not to data: what a published recording may keep."""

from __future__ import annotations

import re

from dataproto_audit.checker.config import NAMES
from dataproto_audit.contracts.fields import FIELDS
from dataproto_audit.probes import Settings
from dataproto_audit.reference.losses import LOSS_MODES

NOT_IDS = frozenset(("position_ids", "mm_token_type_ids", "token_type_ids")) | {
    name for name in FIELDS
    if name not in ("prompt_ids", "prompts", "responses", "input_ids", "raw_prompt", "reward_model",
                    "extra_info", "data_source", "uid", "index")
}  # fmt: skip
"""Columns of integers that are no token ids: masks, positions, sizes of images."""
ARRAYS = frozenset(("image_grid_thw",)) | {
    name for name, field in FIELDS.items() if field.kind == "tensor" and name in NOT_IDS
}
"""Columns with an array in each row that checks read."""
COLUMNS = frozenset(FIELDS) | {
    "acc", "multi_modal_data", "multi_modal_inputs", "num_turns", "__num_turns__",
    "reward_baselines",
}  # fmt: skip
TEXTUAL = frozenset(("raw_prompt", "data_source", "reward_model", "extra_info", "index"))
"""Columns that a data set fills: also a number there is data."""
CELL_KEYS = frozenset(("index",))
IMAGES = ("multi_modal_inputs", "multi_modal_data")
IMAGE_KEYS = frozenset((
    "pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "image", "images",
    "video", "videos", "second_per_grid_ts", "pixel_attention_mask", "image_sizes",
))  # fmt: skip
ENTRIES = frozenset(FIELDS) | frozenset(Settings.known()) | {
    *(name for names in NAMES.values() for name in names),
    # batches
    "global_step", "global_steps", "global_token_num", "rank", "validate", "do_sample",
    "recompute_log_prob", "use_dynamic_bsz", "steps", "split", "against", "metrics", "max_tokens",
    # updates
    "pg_loss", "kl_loss", "entropy_loss", "total", "normaliser", "rows", "tokens", "indices",
    "micro_batch", "micro_batches", "mini_batches", "peak_token_sum", "token_limit", "packed",
    "restarts", "mask", "cpu_s", "wall_s", "attended", "lengths", "seen", "loss_mode",
    "gate_temperatures", "old", "eps", "vf_loss", "vf_clipfrac", "vpred_mean", "cliprange_value",
    # weights
    "engine_stale", "engine_unreadable", "engine_prefix_cache_reset", "old_log_prob_version",
    "sync_probe", "sync_probe_skipped", "trainer", "engine", "process_reward",
}  # fmt: skip
"""Entries of meta and evidence that checks read, at any depth."""
_TOLD = {"loss_mode": LOSS_MODES, "old": ("new", "stored")}
"""What a worker tells of the way in which it computed the loss."""
_METRIC = re.compile(
    r"(actor|audit|critic|global_seqlen|groups|perf|prompt_length|response|response_length"
    r"|response_mask|rollout|rollout_corr|timing_s|timing_per_token_ms|training)/[\w/@.-]+"
)
_PARAMETER = re.compile(r"[\w.]+")
_CHOICE = re.compile(r"[a-z0-9_+.-]{1,24}")


def is_id(name: str) -> bool:
    """Whether an entry or a tensor of this name holds token ids."""
    return name.endswith(("_id", "_ids")) and name not in NOT_IDS


def is_entry(section: str, name: object) -> bool:
    """Whether an entry in a section of meta or evidence is one that checks know."""
    if not isinstance(name, str):
        return False
    if section == "metrics":
        return _METRIC.fullmatch(name) is not None
    if section.endswith("_checksum"):
        return _PARAMETER.fullmatch(name) is not None
    return name in ENTRIES or is_id(name)


def is_choice(name: str, value: str) -> bool:
    """Whether a text is what a setting or a loss is set to, such as ``token-mean``."""
    if name in _TOLD:
        return value in _TOLD[name]
    return name in Settings.known() and _CHOICE.fullmatch(value) is not None
