"""Ranks of the stand-ins in one process, and the audit of what they told."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dataproto_audit.auditor import Auditor, Settings
from dataproto_audit.integrations import (
    verl_workers_engine,
    verl_workers_legacy,
    verl_workers_megatron,
)
from dataproto_audit.integrations.options import Options
from dataproto_audit.integrations.rank_evidence import RankEvidence
from dataproto_audit.integrations.verl_workers import Workers
from dataproto_audit.integrations.worker_record import Place
from dataproto_audit.protocol import DataProto
from dataproto_audit.reference.losses import policy_loss
from dataproto_audit.reference.values import value_loss

CLIP = 0.5
"""Of the critic's values."""
ROWS, PROMPT, RESPONSE = 8, 4, 6
CODES = {"DPA501", "DPA502", "DPA503", "DPA505", "DPA506", *(f"DPA70{n}" for n in range(1, 7))}
SETTINGS = Settings(
    loss_agg_mode="token-mean", clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0,
    use_kl_loss=False, entropy_coeff=0.0, trainer_dtype="float32",
)  # fmt: skip


def batch_of(rows: int = ROWS, seed: int = 0) -> DataProto:
    """Rows of different lengths; old log-probs are those of the stand-ins' model."""
    tiny = importlib.import_module("verl.workers.tiny")
    made = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, PROMPT + 1, (rows,), generator=made)
    answers = torch.randint(1, RESPONSE + 1, (rows,), generator=made)
    column = torch.arange(PROMPT + RESPONSE)
    mask = (column >= PROMPT - prompts[:, None]) & (column < PROMPT + answers[:, None])
    ids = torch.randint(1, 60, mask.shape, generator=made) * mask
    tensors = {
        "input_ids": ids, "attention_mask": mask.long(), "responses": ids[:, PROMPT:],
        "position_ids": (mask.long().cumsum(1) - 1).clamp(min=0),
        "response_mask": mask[:, PROMPT:].long(),
        "advantages": torch.randn(rows, 1, generator=made) * mask[:, PROMPT:],
    }  # fmt: skip
    with torch.no_grad():
        tensors["old_log_probs"] = tiny.padded_log_probs(tiny.Toy(), tensors)
    return DataProto.from_dict(tensors, meta_info={"temperature": 1.0})


class Jagged(dict[str, Any]):
    """Rows as the engine's workers get them: ids without padding, the rest as it was."""

    @classmethod
    def of(cls, batch: DataProto, **more: Any) -> "Jagged":
        keep = batch.batch["attention_mask"] != 0
        jagged = {
            name: torch.nested.as_nested_tensor(
                [row[k] for row, k in zip(batch.batch[name], keep, strict=True)],
                layout=torch.jagged,
            )
            for name in ("input_ids", "position_ids")
        }
        return cls({**dict(batch.batch.items()), **jagged}, **more)

    def __len__(self) -> int:
        return int(self["attention_mask"].shape[0])

    def rows(self, index: list[int]) -> "Jagged":
        out = Jagged()
        for name, value in self.items():
            if not isinstance(value, torch.Tensor):
                out[name] = value
            elif value.is_nested:
                parts = value.unbind()
                out[name] = torch.nested.as_nested_tensor(
                    [parts[i] for i in index], layout=torch.jagged
                )
            else:
                out[name] = value[index]
        return out


def engine_loss(out: Any, micro: Jagged) -> torch.Tensor:
    """This micro-batch's part of the token mean over the mini-batch, for a mean over ranks."""
    widths = verl_workers_engine.response_lengths(micro)
    values = [row[len(row) - n - 1 : len(row) - 1]
              for row, n in zip(out["log_probs"].unbind(), widths, strict=True)]  # fmt: skip
    log_probs = torch.nn.utils.rnn.pad_sequence(values, batch_first=True)
    width = log_probs.shape[1]
    mask = micro["response_mask"][:, :width]
    loss = policy_loss(
        log_probs=log_probs, old_log_probs=micro["old_log_probs"][:, :width],
        advantages=micro["advantages"][:, :width], response_mask=mask, clip_ratio_low=0.2,
        clip_ratio_high=0.2, clip_ratio_c=3.0, loss_agg_mode="token-mean",
    )["total"]  # fmt: skip
    return loss * float(mask.sum()) / micro["batch_num_tokens"] * micro["dp_size"]


def critic_loss(out: Any, micro: Jagged, *, local: bool = False) -> torch.Tensor:
    """This micro-batch's part of the value loss of the mini-batch, for a mean over ranks, or
    (``local``) its own mean, as in 0.7.1."""
    widths = verl_workers_engine.response_lengths(micro)
    rows = verl_workers_engine.responses_of(out["values"], widths)
    values = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).requires_grad_()
    fields = [micro[name][:, : values.shape[1]] for name in ("values", "returns", "response_mask")]
    loss = value_loss(values, *fields, clip=CLIP)
    share = float(fields[-1].sum()) / micro["batch_num_tokens"] * micro["dp_size"]
    return loss * (1.0 if local else share)


def actor_config(**changes: Any) -> SimpleNamespace:
    """Settings of the legacy actors."""
    known = {
        "use_remove_padding": False, "use_dynamic_bsz": False, "ppo_max_token_len_per_gpu": 20,
        "ppo_mini_batch_size": 4, "ppo_micro_batch_size_per_gpu": 2, "ppo_epochs": 1,
    }  # fmt: skip
    return SimpleNamespace(**known | changes)


META = {"use_dynamic_bsz": False, "micro_batch_size": 2, "max_token_len": 20, "temperature": 1.0}


def call(
    kind: str, stage: str, config: SimpleNamespace, change: Any = None, *, by_name: bool = False
) -> Any:  # fmt: skip
    """``run(batch)``: one rank's stage; ``change`` may bend its worker beforehand; ``by_name``: it
    is handed the names of its rows, as V1's critic is."""
    worker: Any
    if kind in ("legacy", "megatron"):
        name = {"legacy": "dp_actor", "megatron": "megatron_actor"}[kind]
        module = importlib.import_module(f"verl.workers.actor.{name}")
        made = module.DataParallelPPOActor if kind == "legacy" else module.MegatronPPOActor
        worker = made(config, None if stage == "ref_log_prob" else "adam")
        bent = worker
    else:
        folder = kind.removeprefix("engine-")
        module = importlib.import_module(f"verl.workers.engine.{folder}.transformer_impl")
        workers = importlib.import_module("verl.workers.engine_workers")
        critic = stage == "update_critic"
        head = "ValueHead" if critic else "LMHead"
        made = getattr(module, f"FSDPEngineWith{head}" if folder == "fsdp" else "MegatronEngine")
        bent = made()
        worker = workers.TrainingWorker(
            bent, critic_loss if critic else engine_loss, forward_only=stage == "ref_log_prob",
            model_type="value_model" if critic else "language_model",
        )  # fmt: skip
    if change is not None:
        change(bent)

    def run(batch: DataProto) -> None:
        if kind.startswith("engine"):
            data = Jagged.of(
                batch, use_dynamic_bsz=config.use_dynamic_bsz, use_remove_padding=True,
                max_token_len_per_gpu=config.ppo_max_token_len_per_gpu,
                micro_batch_size_per_gpu=config.ppo_micro_batch_size_per_gpu,
                mini_batch_size=config.ppo_mini_batch_size,
            )  # fmt: skip
            given = SimpleNamespace(fetch=lambda: data) if by_name else data
            (worker.train_mini_batch if stage.startswith("update") else worker.infer_batch)(given)
        elif stage != "update_actor":
            batch.meta_info.update(META, use_dynamic_bsz=config.use_dynamic_bsz)
            worker.compute_log_prob(batch)
        elif kind == "legacy":
            worker.update_policy(batch)
        else:
            worker.update_policy(worker.make_minibatch_iterator(batch))

    return run


def counted(batch: DataProto, ranks: int, size: int) -> Callable[[Any], tuple[int, int]]:
    """What ranks agree on before each mini-batch: its tokens, and their own number."""
    parts = [part.batch["response_mask"] for part in batch.chunk(ranks)]
    starts = iter(range(0, len(parts[0]), size))

    def count(_: Any) -> tuple[int, int]:
        start = next(starts)
        return sum(int(part[start : start + size].sum()) for part in parts), ranks

    return count


@dataclass
class Told:
    """What the audit says of a stage."""

    evidence: dict[str, Any]
    tensors: dict[str, Any]
    findings: dict[str, Any] = field(default_factory=dict)
    outcomes: dict[str, Any] = field(default_factory=dict)


@contextmanager
def hooked(options: Options) -> Iterator[Workers]:
    """Workers of this process are looked into."""
    workers = Workers(options)
    workers.install()
    try:
        yield workers
    finally:
        workers.detach()


def stage_of(
    kind: str, stage: str, tmp_path: Path, patch: pytest.MonkeyPatch, *, ranks: int = 2,
    config: SimpleNamespace | None = None, change: Callable[[int, Any], None] | None = None,
    batch: DataProto | None = None, actor: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None, by_name: bool = False, **options: Any,
) -> Told:  # fmt: skip
    """Run ``stage`` on ``ranks`` ranks one after the other, and audit it."""
    batch = batch_of() if batch is None else batch
    chosen = Options(run_dir=str(tmp_path / "run"), workers=True, hang_timeout_s=0, **options)
    told = RankEvidence(chosen, {"actor_rollout_ref": {"actor": actor or {}}, **(more or {})})
    with hooked(chosen):
        told.enter(stage, looks=True)
        for rank, part in enumerate(batch.chunk(ranks)):
            place = Place(rank, ranks, rank, ranks)
            for module in (verl_workers_legacy, verl_workers_engine, verl_workers_megatron):
                patch.setattr(module, "here", lambda splits=1, place=place: place)
            if kind.startswith("engine"):
                patch.setattr(verl_workers_engine, "_place", lambda engine, place=place: place)
            if kind == "megatron":
                patch.setattr(
                    verl_workers_megatron.MegatronCalls, "_place", lambda self, place=place: place
                )

            def bend(worker: Any, rank: int = rank) -> None:
                worker.counted = counted(
                    batch, ranks, (config or actor_config()).ppo_mini_batch_size
                )
                if change is not None:
                    change(rank, worker)

            call(kind, stage, config or actor_config(), bend, by_name=by_name)(part)
        evidence, tensors = told.leave(stage, batch)
    told.finish()
    auditor = Auditor(SETTINGS, on_fail="record")
    auditor.begin_step(1)
    whole = DataProto.from_dict({**dict(batch.batch.items()), **tensors},
                                meta_info={"temperature": 1.0})  # fmt: skip
    result = auditor.boundary(stage, whole, evidence=evidence)
    return Told(
        evidence, tensors,
        {f.code: f for f in result.findings if f.code in CODES and f.severity != "info"},
        {o.code: o for o in result.outcomes if o.code in CODES},
    )  # fmt: skip
