"""The driver's side of what workers tell: ask before a stage, read after it, watch meanwhile.

Answers are laid side by side in the order of data-parallel ranks, as verl cuts a batch into equal
contiguous chunks. What is missing stays missing: the checks that need it are not checkable, and the
log says once why.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dataproto_audit.batch import BatchView
from dataproto_audit.integrations.critic_evidence import critic_losses, looks_at_critics
from dataproto_audit.integrations.hang_watch import HangWatch
from dataproto_audit.integrations.options import Options
from dataproto_audit.integrations.verl_settings import at
from dataproto_audit.integrations.worker_files import Answer, Asked, exchange_for
from dataproto_audit.reference.losses import LOSS_MODES, TOKEN_MEAN, TOKEN_SUM

log = logging.getLogger("dataproto_audit")

STAGES = ("old_log_prob", "ref_log_prob", "update_critic", "update_actor")
"""Stages in which workers are asked."""
FIELDS = {
    "update_actor": (("update_log_probs", "update_entropys"), "mini_batch"),
    "update_critic": (("update_values",), "value_mini_batch"),
}
"""What an update tells of each token, and the field of the mini-batch of each row."""


class RankEvidence:
    """What workers told of the stage that the driver is in."""

    def __init__(self, options: Options, config: Mapping[str, Any]) -> None:
        self._options, self._config = options, config
        self._exchange = exchange_for(options)
        self._watch = HangWatch(self._exchange, timeout_s=options.hang_timeout_s)
        self._call, self._stage, self._looks = 0, "", False
        self._said: set[str] = set()
        self._hooks: dict[str, float] = {}

    @property
    def cpu_s(self) -> float:
        """CPU seconds that the hooks of all ranks have taken, as far as they told."""
        return sum(self._hooks.values())

    def start(self) -> None:
        """The run begins: what an earlier one left is of no use."""
        self._exchange.remove()
        self._watch.on_signal()

    def enter(self, stage: str, *, looks: bool) -> None:
        """A stage begins; of several calls of one stage the first counts."""
        if stage not in STAGES or self._stage == stage or self._passed_over(stage):
            return
        self._stage, self._call, self._looks = stage, self._call + 1, looks
        self._exchange.ask(Asked(stage, self._call, looks))
        self._watch.begin(self._call, stage)

    def leave(self, stage: str, batch: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Evidence and tensors of the stage that is over, for the rows of ``batch``."""
        if stage != self._stage:
            return {}, {}
        self._stage = ""
        self._watch.end()
        self._exchange.close()
        if not self._looks:  # nobody was asked for more than notes, and there may be no batch
            return {}, {}
        told = self._exchange.answers(self._call)
        for answer in told:  # counted since its process began
            process = str(answer.told.get("process", answer.told["rank"]))
            spent = float(answer.told.get("hooks_cpu_s", 0.0))
            self._hooks[process] = max(self._hooks.get(process, 0.0), spent)
        answers = _one_each(told)
        view = BatchView.of(batch)
        why = _unusable(answers, view.rows)
        if why:
            self._say(stage, why)
            return {}, {}
        evidence: dict[str, Any] = {"ranks": [dict(answer.told["note"]) for answer in answers]}
        first = 0
        for note in evidence["ranks"]:
            note["first_row"] = first
            first += note["rows"]
        tensors = _tensors(stage, answers, view) if stage in FIELDS else {}
        if stage == "update_actor":
            losses = self._losses(answers, view)
            evidence |= {"losses": losses} if losses else {}
        elif stage == "update_critic":
            losses, why = critic_losses(self._config, answers)
            evidence |= {"losses": losses} if losses else {}
            if why:
                self._say(stage, why)
            tensors = tensors if losses else {}
        if self._options.rows:  # ranks held all rows, and the sample is some of them
            evidence = {}
        return evidence, tensors

    def _passed_over(self, stage: str) -> bool:
        """True where the rollout's log-probs are taken for old ones, without the workers, and
        where critics are not looked into."""
        if stage == "update_critic":
            return not looks_at_critics(self._config)
        bypass = at(self._config, "algorithm.rollout_correction.bypass_mode")
        return stage == "old_log_prob" and bool(bypass)

    def _say(self, stage: str, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            log.warning("nothing is known of the workers in %s: %s; what needs it is not "
                        "checkable.", stage, why)  # fmt: skip

    def _losses(self, answers: Sequence[Answer], view: BatchView) -> list[dict[str, Any]]:
        """One entry a mini-batch, its total as the mean over ranks, which is how gradients meet."""
        why = _other_loss(self._config) or _not_told(answers)
        actor = at(self._config, "actor_rollout_ref.actor") or {}
        mode = actor.get("loss_agg_mode") or TOKEN_MEAN
        legacy = bool(answers) and answers[0].told.get("path") == "legacy"
        empty = not bool((view.numpy("response_mask") != 0).any(1).all())
        if not why and not legacy and empty and mode not in (TOKEN_MEAN, TOKEN_SUM):
            why = "rows without a trained token, which the engine counts and the loss does not"
        if why:
            self._say("update_actor", f"losses are not recomputed: {why}")
            return []
        kind = _loss_mode(actor)
        entries = []
        for number, parts in enumerate(zip(*(a.told["losses"] for a in answers), strict=True)):
            entry = {
                "mini_batch": number,
                "total": sum(part["total"] for part in parts) / len(parts),
                "eps": max(part["eps"] for part in parts),
                **{k: answers[0].told[k] for k in ("split", "old") if k in answers[0].told},
                **kind,
            }
            if mode == TOKEN_MEAN and all("tokens" in part for part in parts):
                entry["normaliser"] = parts[0]["tokens"]
            entries.append(entry)
        return entries

    def finish(self) -> None:
        """The run is over: nothing stays behind."""
        self._watch.finish()
        self._exchange.remove()


def _one_each(answers: Sequence[Answer]) -> list[Answer]:
    """The first answer of each data-parallel rank, in their order."""
    found: dict[int, Answer] = {}
    for answer in answers:
        found.setdefault(int(answer.told["dp_rank"]), answer)
    return [found[rank] for rank in sorted(found)]


def _unusable(answers: Sequence[Answer], rows: int) -> str:
    if not answers:
        return ("no worker told anything (the plugin has to be loaded there, too, and `run_dir` "
                "on a file system of all nodes)")  # fmt: skip
    size = int(answers[0].told["dp_size"])
    if len(answers) != size:
        return f"{len(answers)} of {size} ranks told something"
    return ""


def _tensors(
    stage: str, answers: Sequence[Answer], view: BatchView
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Fields of the workers' rows, where these are the rows of the batch."""
    if sum(int(answer.told["note"]["rows"]) for answer in answers) != view.rows:
        return {}
    found = {}
    per_token, number = FIELDS[stage]
    for name in per_token:
        if all(name in answer.arrays for answer in answers):
            parts = [_wide(answer.arrays[name], view.response or 0) for answer in answers]
            found[name] = torch.from_numpy(np.concatenate(parts))
    if found:
        parts = [answer.arrays["mini_batch"] for answer in answers]
        found[number] = torch.from_numpy(np.concatenate(parts))
    return found


def _wide(values: Any, width: int) -> Any:
    out = np.zeros((len(values), width), np.float32)
    used = min(width, values.shape[1])
    out[:, :used] = values[:, :used]
    return out


def _loss_mode(actor: Mapping[str, Any]) -> dict[str, Any]:
    """Which policy loss it is, where it is not PPO's."""
    kind = at(actor, "policy_loss.loss_mode") or "vanilla"
    if kind == "vanilla":
        return {}
    taus = (actor.get("tau_pos"), actor.get("tau_neg"))
    gates = {"gate_temperatures": taus} if kind == "sapo" and None not in taus else {}
    return {"loss_mode": kind, **gates}


def _other_loss(config: Mapping[str, Any]) -> str:
    """Why this run's loss is none that is recomputed; '' where it is."""
    actor = at(config, "actor_rollout_ref.actor") or {}
    kind = at(actor, "policy_loss.loss_mode") or "vanilla"
    if kind not in LOSS_MODES:
        return f"the loss is {kind}"
    if actor.get("loss_scale_factor"):
        return "it is divided by a loss_scale_factor"
    if at(config, "distillation.enabled"):
        return "it has a distillation term"
    return ""


def _not_told(answers: Sequence[Answer]) -> str:
    if not all(answer.told["losses"] for answer in answers):
        return "the workers did not tell theirs"
    if len({len(answer.told["losses"]) for answer in answers}) > 1:
        return "ranks ran different numbers of mini-batches"
    return ""
