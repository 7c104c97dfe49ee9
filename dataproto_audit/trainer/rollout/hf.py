"""Rollout by transformers: the small fallback where vLLM is not installed.

Sampling is written out here rather than left to ``generate``, so that the log-prob of each token
comes from the very distribution it was drawn from. The cost is a full forward per token and row.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dataproto_audit.codes import RunError, UsageError
from dataproto_audit.trainer.rollout.base import (
    EngineConfig,
    Generation,
    Sampling,
    SyncOptions,
    SyncResult,
    split,
)

if TYPE_CHECKING:
    from torch import Tensor

    from dataproto_audit.trainer.backends.shards import ShardPayload

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
INSTALL = 'Install it: pip install "dataproto-audit[trainer]".'


class HfEngine:
    """See :class:`~dataproto_audit.trainer.rollout.base.Engine`."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._model: Any = None

    def load(self) -> dict[str, Any]:
        """Import transformers and load the model on the GPU if there is one."""
        os.environ.update(ENVIRONMENT)
        started, cpu = time.perf_counter(), time.process_time()
        try:
            import torch
            import transformers
        except ImportError as error:
            raise UsageError(
                "DPA858",
                f"transformers cannot be imported ({error}).",
                INSTALL,
            ) from error
        imported = time.perf_counter()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        transformers.logging.disable_progress_bar()
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                self.config.model_dir,
                dtype=getattr(torch, self.config.dtype),
                attn_implementation=self.config.attn_implementation,
                local_files_only=True,
            )
        except Exception as error:  # a broken folder raises almost anything
            raise RunError(
                "DPA865",
                f"transformers cannot load {self.config.model_dir} ({error}).",
                "Check the folder with a plain from_pretrained.",
            ) from error
        self._model = model.to(device).eval().requires_grad_(False)
        return {
            "engine": "hf",
            "version": transformers.__version__,
            "pid": os.getpid(),
            "device": device,
            "import_s": imported - started,
            "engine_s": time.perf_counter() - imported,
            "cpu_s": time.process_time() - cpu,
        }

    def generate(
        self,
        tokens_T: NDArray[np.int32],
        length_K: NDArray[np.int32],
        count_K: NDArray[np.int32],
        sampling: Sampling,
    ) -> Generation:
        """Sample every row by itself, ``max_num_seqs`` rows at a time."""
        import torch

        cpu = time.process_time()
        prompts = split(tokens_T, length_K)
        rows = [ids for ids, n in zip(prompts, count_K.tolist(), strict=True) for _ in range(n)]
        generator = torch.Generator(self._model.device).manual_seed(sampling.seed)
        size = (len(rows), sampling.max_tokens)
        tokens_NW = np.full(size, self.config.pad_id, np.int32)
        log_probs_NW = np.zeros(size, np.float32)
        length_N = np.zeros(len(rows), np.int32)
        stopped_N = np.zeros(len(rows), np.bool_)
        for begin in range(0, len(rows), self.config.max_num_seqs):
            cut = slice(begin, begin + self.config.max_num_seqs)
            with torch.inference_mode():
                steps = self._sample(rows[cut], sampling, generator)
                for column, (token, log_prob, alive) in enumerate(steps):
                    tokens_NW[cut, column] = np.where(alive, token, self.config.pad_id)
                    log_probs_NW[cut, column] = np.where(alive, log_prob, 0.0)
                    length_N[cut] += alive
                    stopped_N[cut] |= alive & np.isin(token, self.config.stop_ids)
        width = int(length_N.max(initial=0))
        used = {**sampling._asdict(), "n": int(count_K[0]) if len(count_K) else 1}
        used["stop_token_ids"] = list(self.config.stop_ids)
        tokens_NW, log_probs_NW = tokens_NW[:, :width], log_probs_NW[:, :width]
        spent = time.process_time() - cpu
        return Generation(tokens_NW, length_N, log_probs_NW, stopped_N, used, spent)

    def _sample(
        self, rows: list[list[int]], sampling: Sampling, generator: Any
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.bool_]]]:
        """Yield token, log-prob and "row still running" of each column, until all have stopped."""
        import torch

        ids, mask = _left_padded(rows, self.config.pad_id, self._model.device)
        position = (mask.cumsum(-1) - 1).clamp(min=0)
        alive = np.ones(len(rows), np.bool_)
        cache = None
        for _ in range(sampling.max_tokens):
            output = self._model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=position,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
            log_probs = _processed(output.logits[:, -1].float(), sampling)
            if sampling.temperature == 0:
                token = log_probs.argmax(-1, keepdim=True)
            else:
                token = torch.multinomial(log_probs.exp(), 1, generator=generator)
            chosen = log_probs.gather(-1, token)[:, 0].cpu().numpy()
            token_N = token[:, 0].cpu().numpy()
            yield token_N, chosen, alive.copy()
            alive &= ~np.isin(token_N, self.config.stop_ids)
            if not alive.any():
                return
            ids, position = token, position[:, -1:] + 1
            mask = torch.cat([mask, torch.ones_like(token)], dim=1)

    def score(
        self,
        tokens_T: NDArray[np.int32],
        length_K: NDArray[np.int32],
        tail_K: NDArray[np.int32],
        temperature: float,
    ) -> NDArray[np.float32]:
        """Log-probs of given tokens at ``temperature``, one plain forward for all rows."""
        import torch

        rows = split(tokens_T, length_K)
        ids, mask = _left_padded(rows, self.config.pad_id, self._model.device)
        position = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.inference_mode():
            output = self._model(
                input_ids=ids, attention_mask=mask, position_ids=position, use_cache=False
            )
            log_probs = torch.log_softmax(output.logits[:, :-1].float() / temperature, -1)
            chosen = log_probs.gather(-1, ids[:, 1:, None])[..., 0].cpu().numpy()
        tails = [row[len(row) - tail :] for row, tail in zip(chosen, tail_K.tolist(), strict=True)]
        return np.concatenate(tails).astype(np.float32) if tails else np.zeros(0, np.float32)

    def load_weights(self, options: SyncOptions, *payloads: ShardPayload) -> SyncResult:
        """Copy joined tensors into the model, and compare its parameters with what arrived.

        Nothing is cached between calls, so there is no prefix cache to reset; tied layers share
        one tensor, so ``repack_tied_head`` has no meaning.
        """
        from dataproto_audit.trainer.rollout import evidence

        cpu = time.process_time()
        weights = evidence.join_payloads(payloads)
        self._model.load_state_dict(weights, strict=False)
        answer = SyncResult(payloads[0].version, True)
        loaded = time.process_time()
        if options.checksum:
            found = {name: value.detach().cpu() for name, value in self._model.named_parameters()}
            found |= {
                name: value.cpu() for name, value in self._model.named_buffers() if name in weights
            }
            answer = evidence.result(payloads, sent=weights, found=found, unread=(), reset=True)
        end = time.process_time()
        return replace(answer, cpu_s=end - cpu, evidence_cpu_s=end - loaded)


def _left_padded(rows: list[list[int]], pad_id: int, device: Any) -> tuple[Tensor, Tensor]:
    """Ids and attention mask i64[rows, longest], padding left."""
    import torch

    width = max(len(row) for row in rows)
    ids = [[pad_id] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _processed(logits: Tensor, sampling: Sampling) -> Tensor:
    """Log-probs f32[rows, vocabulary] after temperature, top-k and top-p; -inf where filtered.

    Temperature 0 is greedy and leaves logits and filter alone, as vLLM does. Top-p keeps the
    smallest set of most likely tokens whose mass reaches p, the token that crosses p included.
    """
    import torch

    if sampling.temperature == 0:
        return torch.log_softmax(logits, -1)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        mass_before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        drop = torch.zeros_like(logits, dtype=torch.bool)
        drop.scatter_(-1, order, mass_before >= sampling.top_p)
        logits = logits.masked_fill(drop, -torch.inf)
    return torch.log_softmax(logits, -1)
