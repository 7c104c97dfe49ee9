"""Steps of verl's own runs, from the files that its calls were saved to.

A folder holds files named after the driver's call and its side (``compute_advantage.in.pkl``); what
each run was configured to do is in ``RUNS``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dataproto_audit.dump.readers import read_batches
from dataproto_audit.probes import Settings
from dataproto_audit.protocol import DataProto
from dataproto_audit.testing.recorded_steps import MADE, RecordedStep, boundaries, order_of

ALL = Settings(
    n=4, temperature=1.0, top_p=1.0, top_k=-1, adv_estimator="grpo", norm_adv_by_std=True,
    gamma=1.0, lam=1.0, loss_agg_mode="token-mean", clip_ratio_low=0.2, clip_ratio_high=0.2,
    clip_ratio_c=3.0, use_kl_loss=True, kl_loss_coef=0.01, kl_loss_type="low_var_kl",
    entropy_coeff=0.0, use_kl_in_reward=False, multi_turn=False, rejection=False,
    max_response_length=16, world_size=1, trainer_dtype="bfloat16", rollout_dtype="float32",
    ref_from_actor=True, on_policy=True, ppo_epochs=1, stop_ids=(3,), pad_id=0, vocab_size=65,
)  # fmt: skip
"""What all these runs share: one rank, training in bfloat16, and an engine in float32."""
SMALL: dict[str, Any] = {"stop_ids": (1,), "vocab_size": 55}
"""What differs in the runs with an earlier tokenizer."""
GAE = replace(ALL, adv_estimator="gae", use_kl_loss=False, use_kl_in_reward=True)


@dataclass(frozen=True)
class Run:
    """``bases`` are those of the catalogue whose faults can be made in it."""

    settings: Settings
    bases: tuple[str, ...]
    balanced: bool = True
    kl_coef: float = 0.001


SAMPLED = "generate_sequences.out.pkl"
PLAIN = ("plain", "unbalanced", "long")
RUNS = {
    "verl-0.7.1/grpo_n4_engine_dyn": Run(replace(ALL, **SMALL), PLAIN),
    "verl-0.7.1/padeos": Run(replace(ALL, pad_id=3), PLAIN),
    "verl-0.7.1/grpo_kl_in_reward": Run(
        replace(ALL, use_kl_in_reward=True, use_kl_loss=False, kl_loss_coef=None),
        ("kl_reward",), kl_coef=0.05,
    ),
    "verl-0.7.1/gae_legacy": Run(replace(GAE, n=1, **SMALL), ("critic",)),
    "verl-0.7.1/tool_legacy": Run(
        replace(ALL, multi_turn=True, max_response_length=112), ("tools",)
    ),
    "verl-0.7.1/inter_legacy": Run(
        replace(ALL, multi_turn=True, max_response_length=80), ("tools",)
    ),
    "verl-0.7.1/rpp": Run(
        replace(ALL, adv_estimator="reinforce_plus_plus", gamma=0.95), ("rpp_tools",)
    ),
    "verl-0.7.1/no_rollout_lp": Run(ALL, PLAIN, balanced=False),
    "verl-0.9.1/v0_grpo_n4": Run(replace(ALL, **SMALL), PLAIN),
    "verl-0.9.1/v0_gae_tool": Run(
        replace(GAE, n=2, multi_turn=True, max_response_length=112),
        ("critic_tools", "kl_reward_tools"),
    ),
}  # fmt: skip


def verl_steps(samples: Path) -> Iterator[tuple[RecordedStep, tuple[str, ...]]]:
    """The step of each run whose files are in ``samples``, and the bases of the faults to make."""
    for name, run in RUNS.items():
        if (samples / name / SAMPLED).is_file():
            yield step_of(samples / name, run), run.bases


def step_of(folder: Path, run: Run) -> RecordedStep:
    """One step from the files of ``folder``."""
    sampled = _read(folder / SAMPLED)
    found = [folder / f"{name}.pkl" for name in ("compute_advantage.out", "_update_actor.in")]
    final = _read(next(path for path in found if path.exists()))
    for part in ("_compute_old_log_prob.out", "_compute_ref_log_prob.out", "_compute_values.out"):
        if (folder / f"{part}.pkl").exists():
            for field, tensor in _read(folder / f"{part}.pkl").batch.items():
                final.batch[field] = tensor
    order = order_of(sampled, final)
    sampled.meta_info.pop("timing", None)
    first = np.argsort(order)[:: run.settings.n or 1]
    own = set(sampled.non_tensor_batch) - {"raw_prompt"}
    arrays = {n: a[first] for n, a in final.non_tensor_batch.items() if n not in own}
    tensors = {n: t[torch.from_numpy(first)] for n, t in final.batch.items()
               if n not in sampled.batch.keys() and n not in MADE}  # fmt: skip  # noqa: SIM118
    meta = {"temperature": run.settings.temperature}
    prompts = DataProto.from_dict(tensors or None, arrays, meta_info=meta)
    return RecordedStep(
        f"{folder.parent.name}/{folder.name}", prompts, sampled, final, run.settings, order,
        run.balanced, kl_coef=run.kl_coef,
    )  # fmt: skip


def _read(path: Path) -> DataProto:
    [saved] = read_batches(path)
    return DataProto.from_dict(saved.tensors, dict(saved.arrays), meta_info=dict(saved.meta))


def strays(step: RecordedStep) -> dict[str, float]:
    """How far a run of the step without a fault is from the record, by field."""
    *_, last = boundaries(step.run())
    told: dict[str, Any] = {}
    for name, tensor in step.final.batch.items():
        made = last.batch.batch[name].double() - tensor.double()
        if name in ("advantages", "returns"):  # verl leaves numbers beside the trained tokens
            made = made[last.batch.batch["response_mask"] != 0]
        told[name] = float(made.abs().max())
    return told
