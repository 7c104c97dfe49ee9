"""Memory and CPU time of scoring tokens: ``python benchmarks/bench_fused.py``.

Two parts. The output layer alone, plain and fused: live bytes at the worst moment (counted at the
dispatcher) above inputs, weight and their gradients, and CPU seconds of forward and backward with
entropy. Then whole rows of ragged length through a small model, padded and packed, plain and
fused: tokens that are computed and the peak. ``--tokens/--hidden/--vocabulary`` set the first,
``--rows/--prompt/--response`` the second.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dataproto_audit.trainer.backends import hf
from dataproto_audit.trainer.backends.base import MicroBatch, ModelSpec, TokenOutputs
from dataproto_audit.trainer.backends.fused import CHUNK_ELEMENTS, fused_scores, plain_scores
from dataproto_audit.trainer.backends.scoring import TokenScoring
from dataproto_audit.trainer.compare.meter import Meter
from dataproto_audit.trainer.models import TinyModel, write_tiny_model

MIB = 2**20
LETTERS = "".join(chr(code) for code in range(0x100, 0x2100))


def measured(work: Callable[[], None], known: list[Tensor]) -> tuple[float, float]:
    """(MiB of activations at the worst moment, CPU seconds of a second, unwatched run)."""
    with Meter({"parameters": known}) as meter:
        work()
    start = time.process_time()
    work()
    return meter.usage().peak["activations"] / MIB, time.process_time() - start


def output_layer(tokens: int, hidden: int, vocabulary: int) -> None:
    """The output layer alone."""
    random = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(tokens, hidden, generator=random).requires_grad_()
    weight_VH = (torch.randn(vocabulary, hidden, generator=random) / hidden**0.5).requires_grad_()
    labels_N = torch.randint(0, vocabulary, (tokens,), generator=random)
    known = [hidden_NH, weight_VH]
    found: dict[str, tuple[Tensor, ...]] = {}

    def run(name: str, chunk: int | None) -> None:
        if name == "plain":
            scores = plain_scores(hidden_NH @ weight_VH.t(), labels_N, temperature=1, entropy=True)
        else:
            scores = fused_scores(
                hidden_NH, weight_VH, labels_N, temperature=1, entropy=True, chunk=chunk
            )
        chosen_N, entropy_N = scores
        assert entropy_N is not None
        grads = torch.autograd.grad((chosen_N.sum() + 0.1 * entropy_N.sum()), known)
        found[name] = (chosen_N.detach(), entropy_N.detach(), *grads)

    logits = tokens * vocabulary * 4 / MIB
    print(f"output layer: {tokens} tokens, hidden {hidden}, vocabulary {vocabulary}, float32")
    print(f"  logits once: {logits:.0f} MiB; weight and its gradient: "
          f"{vocabulary * hidden * 4 / MIB:.0f} MiB each")  # fmt: skip
    for name, chunk in (
        ("plain", None),
        ("fused, as it comes", max(1, CHUNK_ELEMENTS // vocabulary)),
        ("fused, 256 tokens", 256),
        ("fused, 64 tokens", 64),
    ):
        peak, spent = measured(lambda name=name, chunk=chunk: run(name[:5], chunk), known)
        values, slopes = (
            max(float((a - b).abs().max() / scale(b)) for a, b in
                zip(found[name[:5]][part], found["plain"][part], strict=True))
            for part, scale in ((slice(0, 2), lambda _: 1.0), (slice(2, 4), largest))
        )  # fmt: skip
        print(f"  {name:20} peak {peak:7.0f} MiB  {spent:6.2f} CPU s  values {values:.1e} nats, "
              f"gradients {slopes:.1e} of the largest")  # fmt: skip


def largest(tensor: Tensor) -> float:
    """Its largest magnitude."""
    return float(tensor.abs().max())


def whole_rows(rows: int, prompt: int, response: int) -> None:
    """Ragged rows through a model of two layers with a vocabulary of some thousands."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = TinyModel(charset=LETTERS, max_position_embeddings=4096, initializer_range=0.1)
        path = write_tiny_model(Path(folder), sizes)
        micro = ragged(rows, prompt, response)
        attended = int(micro.attention_mask_BT.sum())
        print(f"{rows} rows of {prompt} + {response} columns, {attended} of "
              f"{micro.attention_mask_BT.numel()} attended")  # fmt: skip
        for packed, fused in ((False, False), (False, True), (True, False), (True, True)):
            model = hf.build_model(ModelSpec(str(path), attn_implementation="sdpa"))
            scoring = TokenScoring(packed, fused)
            if packed or fused:
                scoring.install(model)

            def work(model=model, scoring=scoring) -> None:
                out = score(model, scoring, micro)
                assert out.entropy_BR is not None
                (out.log_probs_BR.sum() + 0.1 * out.entropy_BR.sum()).backward()
                model.zero_grad()

            peak, spent = measured(work, list(model.parameters()))
            name = f"{'packed' if packed else 'padded'}, {'fused' if fused else 'plain'}"
            print(f"  {name:15} peak {peak:7.1f} MiB  {spent:6.2f} CPU s")


def score(model: torch.nn.Module, scoring: TokenScoring, micro: MicroBatch) -> TokenOutputs:
    """By whichever path ``scoring`` stands for."""
    if scoring.packed or scoring.fused:
        return scoring.score(model, micro, temperature=1.0, entropy=True)
    logits = hf.response_logits(model, micro, keep=True)
    return hf.token_outputs(logits, micro, temperature=1.0, entropy=True)


def ragged(rows: int, prompt: int, response: int) -> MicroBatch:
    """Lengths between an eighth and the whole of prompt and response."""
    random = np.random.default_rng(0)
    before, after = (random.integers(size // 8, size + 1, (rows, 1)) for size in (prompt, response))
    columns = np.arange(prompt + response)
    mask = torch.from_numpy((columns >= prompt - before) & (columns < prompt + after)).long()
    ids = torch.from_numpy(random.integers(3, 5000, mask.shape)) * mask
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return MicroBatch(ids, mask, positions, ids[:, prompt:])


def main() -> None:
    """Print both parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("tokens", 1024), ("hidden", 256), ("vocabulary", 50_000),
        ("rows", 16), ("prompt", 64), ("response", 192),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    output_layer(chosen.tokens, chosen.hidden, chosen.vocabulary)
    whole_rows(chosen.rows, chosen.prompt, chosen.response)


if __name__ == "__main__":
    main()
