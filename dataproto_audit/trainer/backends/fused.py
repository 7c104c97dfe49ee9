"""Log-probs and entropies of chosen tokens without the whole ``[tokens, vocabulary]`` of logits.

Suffix legend: ``_N`` scored tokens, ``_NH`` tokens x hidden size, ``_VH`` vocabulary x hidden size.

The output layer runs over a few tokens at a time. Backward computes each chunk's logits again, so
that at no time more than one chunk of them is alive: memory ``chunk * V`` instead of several times
``N * V``, for one more matrix product. The mathematics is that of the plain path: logits in the
model's precision, everything after them in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24
"""Logits held at once (64 MiB in float32): 110 tokens of a vocabulary of 152 thousand."""


def plain_scores(
    logits: Tensor, labels: Tensor, *, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each label under ``softmax(logits / temperature)``, and that distribution's
    entropy (nats) if asked for; float32, through autograd's own operations.

    ``logits`` has one axis more than ``labels``, the vocabulary, behind the others.
    """
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    if not entropy:
        nll_N = F.cross_entropy(logits.flatten(0, -2), labels.reshape(-1), reduction="none")
        return -nll_N.view(labels.shape), None
    log_p = logits.log_softmax(-1)
    chosen = log_p.gather(-1, labels[..., None]).sum(-1)  # one column; FSDP warns of views
    return chosen, _entropy(log_p)


def _entropy(log_p: Tensor) -> Tensor:
    """Rounding leaves the probabilities of a large vocabulary with a sum off 1 by 1e-6; times
    their mean log that would be 1e-5 nats, so the sum is taken out."""
    p = log_p.exp()
    total = p.sum(-1)
    return total.log() - (p * log_p).sum(-1) / total


def fused_scores(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    labels_N: Tensor,
    *,
    temperature: float,
    entropy: bool,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """:func:`plain_scores` of ``hidden_NH @ weight_VH.T``, in chunks of ``chunk`` tokens (default:
    as many as :data:`CHUNK_ELEMENTS` allows).

    ``weight_VH`` is the whole output layer, without a bias; a layer that FSDP has cut must be
    gathered around forward and backward, as it is inside the root module's forward. Gradients of
    the weight are summed in float32. Not covered: second derivatives.
    """
    size = chunk or max(1, CHUNK_ELEMENTS // weight_VH.shape[0])
    chosen_N, entropy_N = _FusedScores.apply(  # type: ignore[no-untyped-call]  # torch's signature
        hidden_NH, weight_VH, labels_N, temperature, entropy, size
    )
    return chosen_N, entropy_N if entropy else None


class _FusedScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        labels_N: Tensor,
        temperature: float,
        entropy: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        count = hidden_NH.shape[0]
        chosen_N = hidden_NH.new_empty(count, dtype=torch.float32)
        normaliser_N, entropy_N = torch.empty_like(chosen_N), torch.zeros_like(chosen_N)
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            logits = _logits(hidden_NH[part], weight_VH, temperature)
            normaliser_N[part] = logits.logsumexp(-1)
            picked = logits.gather(-1, labels_N[part, None]).squeeze(-1)
            chosen_N[part] = picked - normaliser_N[part]
            if entropy:
                log_p = logits.sub_(normaliser_N[part, None])
                entropy_N[part] = _entropy(log_p)
        ctx.save_for_backward(hidden_NH, weight_VH, labels_N, normaliser_N, entropy_N)
        ctx.temperature, ctx.entropy, ctx.chunk = temperature, entropy, chunk
        return chosen_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_chosen_N, grad_entropy_N = grads
        hidden_NH, weight_VH, labels_N, normaliser_N, entropy_N = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden_NH) if needs_hidden else None
        grad_weight = None
        if needs_weight:
            grad_weight = torch.zeros_like(weight_VH, dtype=torch.float32)
        for start in range(0, hidden_NH.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            log_p = _logits(hidden_NH[part], weight_VH, ctx.temperature)
            log_p.sub_(normaliser_N[part, None])
            # d chosen / d logits = onehot - p;  d entropy / d logits = -p (log p + entropy)
            slope = -grad_chosen_N[part, None]
            grad = log_p.exp()
            if ctx.entropy:
                log_p.add_(entropy_N[part, None]).mul_(grad_entropy_N[part, None])
                grad.mul_(log_p.neg_().add_(slope))
            else:
                grad.mul_(slope)
            del log_p
            grad.scatter_add_(-1, labels_N[part, None], grad_chosen_N[part, None])
            if ctx.temperature != 1.0:
                grad.div_(ctx.temperature)
            low = grad.to(hidden_NH.dtype)
            if grad_hidden is not None:
                torch.mm(low, weight_VH, out=grad_hidden[part])
            if grad_weight is not None:
                if weight_VH.dtype == torch.float32:
                    grad_weight.addmm_(low.t(), hidden_NH[part])
                else:
                    grad_weight += low.t() @ hidden_NH[part]
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight_VH.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _logits(hidden_NH: Tensor, weight_VH: Tensor, temperature: float) -> Tensor:
    """float32, and free to be written into."""
    logits = F.linear(hidden_NH, weight_VH).float()
    return logits.div_(temperature) if temperature != 1.0 else logits
