"""What the names of files say: stage, side, call and step.

Two conventions: files named after a method of verl's driver and its side
(``_update_actor.in.call1.pkl``), and the paths that frameworks write themselves
(``completions_00002.parquet``).
"""

from __future__ import annotations

import re
from pathlib import Path

from dataproto_audit.dump.readers.saved import Hint, When

# Methods of verl's driver and the stage each one is. Sources: RayPPOTrainer.fit of 0.7.1 and
# 0.9.1, and the trainer of V1. The batch that enters _get_gen_batch is what the loader made.
METHODS: dict[str, str] = {
    "_get_gen_batch": "prompts",
    "generate_sequences": "rollout",
    "_balance_batch": "balance",
    "extract_reward": "reward",
    "compute_reward": "reward",
    "_compute_reward_colocate": "reward",
    "_compute_old_log_prob": "old_log_prob",
    "_compute_ref_log_prob": "ref_log_prob",
    "_compute_values": "values",
    "apply_kl_penalty": "kl_reward",
    "_compute_advantage": "advantage",
    "compute_advantage": "advantage",
    "compute_advantage_for_multi_trajectories": "advantage",
    "_update_critic": "update_critic",
    "_update_actor": "update_actor",
    "_validate": "validation",
}
# The generation batch is cut out of the prompts and enters the rollout, which repeats it by n.
_SPECIAL: dict[tuple[str, str], tuple[str, When]] = {
    ("_get_gen_batch", "in"): ("prompts", "after"),
    ("_get_gen_batch", "out"): ("rollout", "before"),
}
STAGE_ORDER = (
    "prompts", "rollout", "union", "balance", "reward", "old_log_prob", "ref_log_prob", "values",
    "kl_reward", "advantage", "update_critic", "update_actor", "sync_weights", "validation",
)  # fmt: skip

_DRIVER = re.compile(
    r"(?:v1\.)?(?P<method>\w+)\.(?P<side>in|out)(?:\.call(?P<call>\d{1,6}))?(?:\.kvmeta|\.td)?\.\w+$"
)
_STORE = re.compile(r"v1\.tq_all_before\.(?P<method>\w+?)(?:\.call(?P<call>\d{1,6}))?\.td\.\w+$")
_STEPS = (
    re.compile(r"(?:^|/)rollout_dump/(\d{1,9})\.jsonl(?:\.gz)?$"),
    re.compile(r"(?:^|/)train_data_step(\d{1,9})\.jsonl$"),
    re.compile(r"(?:^|/)completions_(\d{1,9})\.parquet$"),
    re.compile(r"(?:^|/)(?:rollout_data|train_data)/(\d{1,9})\.pt$"),
    re.compile(r"(?:^|/)rollout/(\d{1,9})/\w+\.jsonl$"),
    re.compile(r"(?:^|/)(?:token_exports|rollouts)/step_(\d{1,9})/"),
    re.compile(r"(?:^|/)(\d{1,9})/(?:gen_batch\.dp|(?:\w+/)?tq_batch\.pt)$"),
)


def hint_of(path: Path) -> Hint:
    """What the path says; an empty hint when it says nothing."""
    name, side = path.name, "in"
    found = _STORE.fullmatch(name)
    if found is None and (found := _DRIVER.fullmatch(name)):
        side = found["side"]
    if found:
        call = int(found["call"] or 0)
        stage, when = _stage(found["method"], side)
        return Hint(stage, when, call, call + 1 if stage else None, found["method"])
    if name in ("gen_batch.dp", "tq_batch.pt"):  # verl's rollout skip keeps what the engine made
        return Hint("rollout", "after", step=step_of(path))
    if step_of(path) is not None and path.parent.name == "rollout_dump":
        return Hint("reward", "after", step=step_of(path))
    return Hint(step=step_of(path))


def _stage(method: str, side: str) -> tuple[str | None, When | None]:
    if (method, side) in _SPECIAL:
        return _SPECIAL[method, side]
    stage = METHODS.get(method)
    when: When = "before" if side == "in" else "after"
    return (stage, when) if stage else (None, None)


def step_of(path: Path) -> int | None:
    """The step in a framework's own path."""
    text = path.as_posix()
    return next((int(m[1]) for pattern in _STEPS if (m := pattern.search(text))), None)


def order_of(hint: Hint, path: Path) -> tuple[int, int, int, str]:
    """Sorts batches of a run as the run made them; files without a stage come first."""
    stage = STAGE_ORDER.index(hint.stage) if hint.stage in STAGE_ORDER else -1
    return hint.step or 0, stage, int(hint.when == "after"), path.as_posix()
