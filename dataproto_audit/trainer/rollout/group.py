"""The driver's handle on the rollout engine: start, generate, sync weights, score.

Nothing here waits without looking: ``ray.wait`` returns as soon as the answer is there *or* the
engine's process is gone, and every wait has a time-out.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayActorError, RayTaskError
from torch import Tensor

from dataproto_audit.codes import CodedError, RunError, UsageError
from dataproto_audit.protocol import DataProto
from dataproto_audit.trainer.remedies import RESUME
from dataproto_audit.trainer.rollout.base import (
    EngineConfig,
    Generation,
    Sampling,
    SyncOptions,
    SyncResult,
    join,
)
from dataproto_audit.trainer.rollout.rows import Widths, to_batch, to_requests
from dataproto_audit.trainer.tokenizer import Tokenizer
from dataproto_audit.trainer.workers.failures import reason_of


class Rollout:
    """One engine in one Ray actor. Make it with :meth:`start`; it is ready after :meth:`ready`."""

    def __init__(
        self, actor: Any, config: EngineConfig, *, widths: Widths, defaults: Mapping[str, Any],
        validation: Mapping[str, Any], timeout_s: float,
    ) -> None:  # fmt: skip
        self._actor = actor
        self._widths = widths
        self._defaults = dict(defaults)
        self._validation = dict(validation)
        self._timeout_s = timeout_s
        self._calls = itertools.count()
        self._loading = actor.load.remote()
        self.config = config
        self.info: dict[str, Any] | None = None
        self.last_cpu_s = 0.0
        """CPU seconds of the engine process in the last call."""

    @classmethod
    def start(
        cls,
        rollout_config: Any,
        model_dir: str,
        *,
        tokenizer: Tokenizer,
        max_prompt_length: int,
        max_response_length: int,
        attn_implementation: str = "sdpa",
        num_gpus: float = 0,
        timeout_s: float = 1800.0,
        ray_options: Mapping[str, Any] | None = None,
    ) -> Rollout:
        """Create the engine's actor and return at once; import and loading go on meanwhile.

        ``rollout_config`` is the ``actor_rollout_ref.rollout`` section; Ray must be running.
        ``timeout_s`` bounds each later call. Raises UsageError DPA858 when the engine's library
        is not installed; everything else shows in :meth:`ready`.
        """
        engine = _engine_class(str(rollout_config.name))
        given = {key: rollout_config.get(key) for key in _ENGINE_KEYS}
        config = EngineConfig(
            model_dir=str(model_dir),
            stop_ids=tuple(tokenizer.stop_ids),
            pad_id=tokenizer.pad_id,
            max_model_len=rollout_config.max_model_len or max_prompt_length + max_response_length,
            attn_implementation=attn_implementation,
            **{key: value for key, value in given.items() if value is not None},
        )
        options = {"num_cpus": 1, "num_gpus": num_gpus, "max_restarts": 0, **(ray_options or {})}
        actor = ray.remote(engine).options(**options).remote(config)
        defaults = {
            "temperature": float(rollout_config.temperature),
            "top_p": float(rollout_config.top_p),
            "top_k": int(rollout_config.top_k),
            "max_tokens": max_response_length,
        }
        validation = {**defaults, "temperature": float(rollout_config.val_kwargs.temperature)}
        widths = Widths(max_prompt_length, max_response_length, tokenizer.pad_id)
        return cls(
            actor, config, widths=widths, defaults=defaults, validation=validation,
            timeout_s=timeout_s,
        )  # fmt: skip

    def ready(self, timeout_s: float = 600.0) -> dict[str, Any]:
        """Wait until the engine has loaded; returns engine, version, pid, device and times.

        Raises UsageError DPA858 (library missing) or DPA851 (settings refused), RunError DPA865
        (died, failed, or not ready in time).
        """
        if self.info is None:
            self.info = dict(self._wait(self._loading, "starting", timeout_s))
        return self.info

    def generate(
        self,
        gen_batch: DataProto,
        *,
        sampling: Mapping[str, Any] | None = None,
        validate: bool = False,
    ) -> DataProto:
        """Sample one response for each row of ``gen_batch`` (already repeated by n, interleaved).

        ``sampling`` overrides single settings; ``validate`` starts from ``val_kwargs``. Without
        ``seed`` the call is seeded from the configured seed and ``meta_info["global_steps"]`` (or
        the number of the call), so a resumed run samples what the first one would have.

        Returns rows in the order of ``gen_batch``: see :func:`.rows.to_batch`. ``meta_info``
        holds ``sampling``, the settings that the engine really used.
        """
        requests = to_requests(gen_batch, self._widths)
        step = gen_batch.meta_info.get("global_steps")
        settings = self._sampling(sampling or {}, validate=validate, step=step)
        self.ready()
        ref = self._actor.generate.remote(
            requests.tokens_T, requests.length_K, requests.count_K, settings
        )
        generation: Generation = self._wait(ref, "generating")
        self.last_cpu_s = generation.cpu_s
        return to_batch(requests, generation, self._widths)

    def _sampling(
        self, overrides: Mapping[str, Any], *, validate: bool, step: int | None
    ) -> Sampling:
        unknown = sorted(set(overrides) - set(Sampling._fields))
        if unknown:
            raise UsageError(
                "DPA851", f"unknown sampling settings {unknown}.", f"Known: {Sampling._fields}."
            )
        call = next(self._calls) if step is None else int(step)
        # The leading 0/1/2 keeps training, validation and unnumbered calls apart.
        stream = 2 if step is None else int(validate)
        entropy = np.random.SeedSequence([self.config.seed, stream, call])
        values = dict(self._validation if validate else self._defaults)
        return Sampling(**{**values, "seed": int(entropy.generate_state(1)[0]), **overrides})

    def sync_weights(
        self,
        shard_refs: Sequence[Any],
        *,
        reset_prefix_cache: bool = True,
        repack_tied_head: bool = True,
        checksum: bool = True,
    ) -> SyncResult:
        """Hand the ranks' exports (ObjectRefs of ShardPayload) to the engine and wait.

        The references go on as top-level arguments: arrays travel from each rank to the engine
        through the object store, never through the driver. Raises the rank's error if an export
        failed, RunError DPA867 if the pieces do not fit, DPA865 if the engine died.
        """
        self.ready()
        options = SyncOptions(reset_prefix_cache, repack_tied_head, checksum)
        ref = self._actor.load_weights.remote(options, *shard_refs)
        try:
            result: SyncResult = self._wait(ref, "loading weights")
        except RunError:
            _raise_of_exports(shard_refs)
            raise
        self.last_cpu_s = result.cpu_s
        return result

    def score(
        self, batch: DataProto, *, temperature: float, rows: Sequence[int] | None = None
    ) -> Tensor:
        """Log-probs f32[len(rows), R] that the engine gives the responses of ``batch``.

        0 off the response's attention. ``rows`` are positions (default: all). Used to check that
        a weight sync arrived: it goes through the engine's own forward, not its prefix cache.
        """
        self.ready()
        responses_BR = batch.batch["responses"]
        width = responses_BR.shape[1]
        picked = list(range(len(batch))) if rows is None else list(rows)
        ids = batch.batch["input_ids"][picked]
        mask = batch.batch["attention_mask"][picked].bool()
        tokens_T, length_K = join([row[on].tolist() for row, on in zip(ids, mask, strict=True)])
        tail_K = mask[:, -width:].sum(-1).numpy().astype(np.int32)
        ref = self._actor.score.remote(tokens_T, length_K, tail_K, float(temperature))
        found = torch.from_numpy(np.array(self._wait(ref, "scoring")))
        out = torch.zeros(len(picked), width)
        out[mask[:, -width:]] = found
        return out

    def shutdown(self) -> None:
        """End the engine's process; safe to call twice."""
        ray.kill(self._actor, no_restart=True)

    def _wait(self, ref: Any, doing: str, timeout_s: float | None = None) -> Any:
        limit = self._timeout_s if timeout_s is None else timeout_s
        done, _ = ray.wait([ref], timeout=limit)
        if not done:
            raise RunError(
                "DPA865", f"the rollout engine has been {doing} for {limit:g} s.", RESUME
            )
        try:
            return ray.get(ref)
        except RayTaskError as error:
            raise _of_task(error, doing) from error
        except RayActorError as error:
            why = reason_of(error)
            raise RunError(
                "DPA865", f"the rollout engine died while {doing} ({why}).", RESUME
            ) from error


_ENGINE_KEYS = (
    "max_num_seqs", "max_num_batched_tokens", "dtype", "gpu_memory_utilization",
    "kv_cache_memory_bytes", "block_size", "seed", "enforce_eager", "enable_prefix_caching",
)  # fmt: skip


def _engine_class(name: str) -> type:
    if name == "vllm":
        from dataproto_audit.trainer.rollout.vllm import INSTALL, VllmEngine

        if importlib.util.find_spec("vllm") is None:
            raise UsageError("DPA858", "vLLM is not installed.", INSTALL)
        return VllmEngine
    if name == "hf":
        from dataproto_audit.trainer.rollout.hf import INSTALL as INSTALL_HF
        from dataproto_audit.trainer.rollout.hf import HfEngine

        if importlib.util.find_spec("transformers") is None:
            raise UsageError("DPA858", "transformers is not installed.", INSTALL_HF)
        return HfEngine
    raise UsageError("DPA851", f"there is no rollout engine {name!r}.", "Use vllm or hf.")


def _of_task(error: RayTaskError, doing: str) -> CodedError:
    """The error that the engine's method raised, with its code if it has one."""
    cause = error.cause
    if isinstance(cause, CodedError):
        return cause
    text = " ".join(f"{type(cause).__name__}: {cause}".split())[:400]
    return RunError("DPA865", f"the rollout engine failed while {doing} ({text}).", RESUME)


def _raise_of_exports(shard_refs: Sequence[Any]) -> None:
    """Raise the error of an export that failed, if one did: the engine is not to blame then."""
    for rank, ref in enumerate(shard_refs):
        try:
            ray.get(ref, timeout=5)
        except RayTaskError as error:
            if isinstance(error.cause, CodedError):
                raise error.cause from error
            raise RunError(
                "DPA863", f"rank {rank} could not export its weights ({error.cause}).", RESUME
            ) from error
        except RayActorError as error:
            raise RunError(
                "DPA864", f"rank {rank} died while exporting its weights.", RESUME
            ) from error
