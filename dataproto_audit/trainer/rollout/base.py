"""What every rollout engine offers, and the plain data that crosses the process boundary.

Only numpy is imported here: what an engine process imports first must cost it nothing.

Legend: K requests, N samples (rows), W longest sample of the call, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from dataproto_audit.trainer.backends.shards import ShardPayload


CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM's CPU attention (``get_supported_head_sizes`` in its ``cpu_attn.py``)."""


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine process needs to start; plain values only, so that it pickles small."""

    model_dir: str
    stop_ids: tuple[int, ...]
    pad_id: int
    max_model_len: int
    max_num_seqs: int = 512
    max_num_batched_tokens: int = 8192
    dtype: str = "float32"
    enforce_eager: bool = True
    gpu_memory_utilization: float = 0.5
    kv_cache_memory_bytes: int = 64 * 2**20
    block_size: int | None = None
    enable_prefix_caching: bool = True
    attn_implementation: str = "sdpa"
    seed: int = 0


class Sampling(NamedTuple):
    """Sampling settings of one call. Temperature 0 is greedy; ``top_k`` -1 means no limit.

    ``seed`` seeds the engine's generator before the call, so a call is reproducible by itself.
    """

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class Generation:
    """Samples of one call, rows in request order, then sample order.

    ``tokens_NW`` is right-padded with the pad id; the stop token, where there is one, is the last
    of the ``length_N`` tokens. ``log_probs_NW`` are taken from the distribution that was sampled
    from (after temperature, top-p and top-k), 0 beyond the length. ``stopped_N`` tells rows that
    ended with a stop token from those cut at ``max_tokens``. ``used`` is read back from the
    engine's own request object. ``cpu_s`` is CPU time of the engine process.
    """

    tokens_NW: NDArray[np.int32]
    length_N: NDArray[np.int32]
    log_probs_NW: NDArray[np.float32]
    stopped_N: NDArray[np.bool_]
    used: dict[str, Any] = field(default_factory=dict)
    cpu_s: float = 0.0


class SyncOptions(NamedTuple):
    """What a weight sync does besides loading; all three belong to a healthy one."""

    reset_prefix_cache: bool = True
    repack_tied_head: bool = True
    checksum: bool = True


@dataclass(frozen=True)
class SyncResult:
    """What the engine says after a weight sync.

    ``checksum`` tells by name what the engine *holds*: the checksum of the tensor that arrived if
    the engine's own copy, read back, equals it in the engine's precision, else the checksum of
    that copy, and the name is listed in ``stale``. ``unreadable`` names what could not be read
    back (see the engine's docstring); for those the log-prob probe is the only evidence.
    """

    version: int
    prefix_cache_reset: bool
    checksum: dict[str, int] = field(default_factory=dict)
    stale: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    cpu_s: float = 0.0
    evidence_cpu_s: float = 0.0
    """The part of ``cpu_s`` that reading back and comparing took."""


class Engine(Protocol):
    """The calls that the driver makes; each engine is a Ray actor of one such class."""

    def load(self) -> dict[str, Any]:
        """Import the library and load the model; returns versions, pid and CPU seconds."""
        ...

    def generate(
        self,
        tokens_T: NDArray[np.int32],
        length_K: NDArray[np.int32],
        count_K: NDArray[np.int32],
        sampling: Sampling,
    ) -> Generation:
        """Sample ``count_K[k]`` continuations of each prompt (concatenated in ``tokens_T``)."""
        ...

    def score(
        self,
        tokens_T: NDArray[np.int32],
        length_K: NDArray[np.int32],
        tail_K: NDArray[np.int32],
        temperature: float,
    ) -> NDArray[np.float32]:
        """Log-probs of the last ``tail_K[k]`` tokens of each row, concatenated."""
        ...

    def load_weights(self, options: SyncOptions, *payloads: ShardPayload) -> SyncResult:
        """Join the ranks' pieces, load them, drop what was cached."""
        ...


def split(tokens_T: NDArray[np.int32], length_K: NDArray[np.int32]) -> list[list[int]]:
    """Cut concatenated token ids back into lists of ``length_K`` tokens."""
    ends = np.cumsum(length_K)
    flat = tokens_T.tolist()
    return [
        flat[end - size : end] for end, size in zip(ends.tolist(), length_K.tolist(), strict=True)
    ]


def join(rows: Sequence[Sequence[int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Concatenate rows of token ids; returns (tokens_T, length_K)."""
    length_K = np.fromiter((len(row) for row in rows), np.int32, len(rows))
    flat = (token for row in rows for token in row)
    return np.fromiter(flat, np.int32, int(length_K.sum())), length_K
