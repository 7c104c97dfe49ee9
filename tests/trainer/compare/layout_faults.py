"""Faults of a layout: each function spoils one rank's FSDP backend, as a mistake in code would."""

import torch
import torch.distributed as dist

from dataproto_audit.trainer.backends import packing, scoring


def _accumulating(backend, change):
    accumulate = backend.accumulate

    def changed(micros, loss, **options):
        return change(accumulate, micros, loss, options)

    backend.accumulate = changed


def scaled_by_micro_batches(backend):
    """Each micro-batch's share of a global mean divided by their number once more."""
    _accumulating(
        backend,
        lambda run, micros, loss, options: run(
            micros, lambda k, outputs: loss(k, outputs) / len(micros), **options
        ),
    )


def _without_last(run, micros, loss, options):
    with torch.no_grad():  # first, so that ranks gather weights equally often
        last = backend_forward(micros[-1], options)
    loss(len(micros) - 1, last)  # the sums look right, the gradient is not
    return [*run(micros[:-1], loss, **options), last]


def backend_forward(micro, options):
    return _BACKEND[0].forward(
        micro, temperature=options["temperature"], entropy=options["entropy"]
    )


_BACKEND = []


def last_micro_batch_dropped(backend):
    """Gradients of all micro-batches but the last."""
    _BACKEND[:] = [backend]
    _accumulating(backend, _without_last)


def one_rank_drops_its_last(backend):
    """Ranks train on unequal numbers of micro-batches."""
    if backend.rank == 1:
        last_micro_batch_dropped(backend)


def averaged_over_ranks(backend):
    """FSDP's mean over ranks left in: gradients are 1 / ranks of what they should be."""
    backward = backend.backward
    backend.backward = lambda loss, *, last: backward(loss / dist.get_world_size(), last=last)


def temperature_forgotten(backend):
    """Log-probs of the raw logits."""
    forward = backend.forward
    backend.forward = lambda micro, *, temperature, entropy: forward(
        micro, temperature=1.0, entropy=entropy
    )


def rows_see_each_other(backend):
    """One causal mask over the whole line, as a mask of ones gives it."""
    within = packing._within_rows

    def leaking(q, k, v, rows, scaling):
        whole = packing.Rows(
            (q.shape[2],),
            tuple(packing._blocks((q.shape[2],), q.device)),
            torch.arange(q.shape[2]),
            rows.ends,
        )
        return within(q, k, v, whole, scaling)

    packing._within_rows = leaking

    def undo():
        packing._within_rows = within

    return undo


def tokens_not_exchanged(backend):
    """Each rank attends to its own tokens alone, and to nothing of its peers'."""

    def alone(x, group):
        own = scoring.my_part(x.shape[2] * group.size, group)
        line = x.new_zeros(*x.shape[:2], x.shape[2] * group.size, x.shape[3])
        line[:, :, own] = x
        return line

    def cut(x, group):
        return x[:, :, scoring.my_part(x.shape[2], group)]

    swaps = packing.heads_for_tokens, packing.tokens_for_heads
    packing.heads_for_tokens, packing.tokens_for_heads = alone, cut

    def undo():
        packing.heads_for_tokens, packing.tokens_for_heads = swaps

    return undo


def positions_begin_anew_on_each_rank(backend):
    """The part of a line that a rank holds is numbered from 0."""
    forward = backend.model.forward

    def changed(*args, **kwargs):
        kwargs["position_ids"] = torch.arange(kwargs["input_ids"].shape[1])[None]
        return forward(*args, **kwargs)

    backend.model.forward = changed


def one_gradient_not_reduced(backend):
    """A norm's gradient is that of one rank, as without the all-reduce that it needs."""
    gradients = backend.gradients

    def spoiled():
        found = gradients()
        found["model.norm.weight"][0].mul_(0.5)
        return found

    backend.gradients = spoiled
