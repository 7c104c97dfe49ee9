"""A policy that can be computed anywhere: logits are hashes of the prefix.

It is a proper conditional distribution (log-softmax over a small vocabulary), so everything that
must hold of log-probs holds exactly: the same prefix gives the same distribution, probabilities
sum to 1, and another temperature or another version of the policy is what it says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Hash = NDArray[np.uint64]
Ids = NDArray[np.int64]
Floats = NDArray[np.float64]

PAD, START, STOP = 0, 1, 2
"""Ids with a meaning; sampled are STOP and all above it, never PAD and START."""
NEVER = -40.0
"""Logit of ids that are not sampled."""


@dataclass(frozen=True)
class ToyPolicy:
    """``version`` moves the logits smoothly: nearby versions are nearby policies."""

    vocab: int = 32
    temperature: float = 1.0
    version: float = 0.0
    spread: float = 2.0
    stop_logit: float = 1.5
    top_p: float = 1.0
    reserved: int = 0

    def at(self, version: float) -> ToyPolicy:
        """The same policy after some training."""
        return replace(self, version=version)

    def log_probs(self, prefix: Hash) -> Floats:
        """Log-probs of every next token ``[N, vocab]`` after prefixes ``[N]``."""
        token = np.arange(1, self.vocab + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        base, drift = _mixed(prefix[:, None] ^ token), _mixed(prefix[:, None] + token)
        logits = self.spread * (_unit(base) + self.version * _unit(drift))
        logits[:, STOP] = self.stop_logit
        logits[:, :STOP] = NEVER
        logits[:, self.vocab - self.reserved :] = NEVER
        logits /= self.temperature
        logits -= logits.max(1, keepdims=True)
        out: Floats = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        return out if self.top_p >= 1.0 else _nucleus(out, self.top_p)

    def score(self, prompt: Hash, responses: Ids) -> tuple[Floats, Floats]:
        """Log-prob of each response token and entropy before it, both ``[N, R]``."""
        chosen, entropy = np.zeros(responses.shape), np.zeros(responses.shape)
        prefix, rows = prompt, np.arange(len(responses))
        for column in range(responses.shape[1]):
            log_p = self.log_probs(prefix)
            chosen[:, column] = log_p[rows, responses[:, column]]
            entropy[:, column] = -(np.exp(log_p) * np.maximum(log_p, 2 * NEVER)).sum(1)
            prefix = extended(prefix, responses[:, column])
        return chosen, entropy


def sample(
    policy: ToyPolicy,
    prefix: Hash,
    width: int,
    random: np.random.Generator,
    *,
    one_token: int,
    truncated: int,
    tools: bool,
) -> tuple[Ids, NDArray[np.bool_], NDArray[np.bool_]]:
    """Responses to prompts ``[N]``: ids, what is attended, and what is trained on, all ``[N, R]``.

    The first ``truncated`` rows never stop, the next ``one_token`` rows stop at once. With
    ``tools``, two of four columns of every other row are a tool's and not the policy's.
    """
    rows = np.arange(len(prefix))
    responses = np.full((len(rows), width), PAD)
    attended, trained = np.zeros((2, len(rows), width), bool)
    endless = rows < truncated
    short = (rows >= truncated) & (rows < truncated + one_token)
    going = np.ones(len(rows), bool)
    for column in range(width):
        log_p = policy.log_probs(prefix)
        noisy = log_p + random.gumbel(size=log_p.shape)
        noisy[endless, STOP] = -np.inf
        tool = (rows % 2 == 0) & (column % 4 in (1, 2)) & tools & ~short
        ids = np.where(short, STOP, noisy.argmax(1))
        low = policy.vocab - policy.reserved if policy.reserved else STOP + 1
        high = policy.vocab - (policy.reserved > 0)
        ids = np.where(tool, random.integers(low, high, len(rows)), ids)
        responses[going, column] = ids[going]
        attended[:, column], trained[:, column] = going, going & ~tool
        prefix = extended(prefix, responses[:, column])
        going = going & (responses[:, column] != STOP)
    return responses, attended, trained


def prompt_hash(prompts: Ids, attended: NDArray[np.bool_]) -> Hash:
    """Prefix hash of left-padded prompts ``[N, P]``; padding does not count."""
    prefix = np.full(len(prompts), 0x243F6A8885A308D3, np.uint64)
    for column in range(prompts.shape[1]):
        prefix = np.where(attended[:, column], extended(prefix, prompts[:, column]), prefix)
    return prefix


def extended(prefix: Hash, token: Ids) -> Hash:
    """Prefix hash after one more token, ``[N]``."""
    return _mixed(prefix * np.uint64(0xD1342543DE82EF95) + token.astype(np.uint64) + np.uint64(1))


def _nucleus(log_p: Floats, top_p: float) -> Floats:
    """The most likely tokens that hold ``top_p`` of the probability, as a distribution."""
    order = np.argsort(-log_p, 1)
    ranked = np.take_along_axis(np.exp(log_p), order, 1)
    before = np.cumsum(ranked, 1) - ranked
    kept = np.zeros(log_p.shape, bool)
    np.put_along_axis(kept, order, before < top_p, 1)
    out = np.where(kept, log_p, -np.inf)
    whole: Floats = out - np.log(np.exp(out).sum(1, keepdims=True))
    return whole


def _mixed(bits: Hash) -> Hash:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _unit(bits: Hash) -> Floats:
    """Uniform numbers in (-1, 1)."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
