"""Scoring only the tokens that are asked for: packed rows, shared sequences, fused output layer.

The padded, unfused path of :mod:`.hf` stays as it is; this one replaces the model's ``forward``, so
that everything that needs whole weights runs inside the root module's forward, where FSDP holds
them gathered.
"""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends.base import MicroBatch, TokenOutputs
from dataproto_audit.trainer.backends.fused import fused_scores, plain_scores
from dataproto_audit.trainer.backends.packing import (
    Packed,
    Rows,
    pack,
    rows_of,
    use_packed_attention,
)
from dataproto_audit.trainer.backends.ulysses import SequenceGroup, gather_tokens, my_part

FAMILIES = ("llama", "qwen2", "qwen3")
"""Model types whose output is ``lm_head(decoder(...))`` and whose attention is causal and full."""


@dataclass
class TokenScoring:
    """How a model scores tokens. ``packed`` lays rows on one line (``use_remove_padding``),
    ``fused`` leaves the logits out (``use_fused_kernels``), ``group`` shares a line over ranks and
    needs ``packed``. ``notes`` collects what the probe of packed rows reads."""

    packed: bool
    fused: bool
    group: SequenceGroup | None = None
    notes: list[dict[str, Any]] = field(default_factory=list)

    def install(self, model: nn.Module) -> None:
        """Make ``model`` score by :func:`scored_forward`; before FSDP wraps it."""
        if self.packed:
            use_packed_attention(model)
        model.forward = types.MethodType(scored_forward, model)

    def score(
        self, model: nn.Module, micro: MicroBatch, *, temperature: float, entropy: bool
    ) -> TokenOutputs:
        """As :meth:`Backend.forward`. Collective."""
        multiple = self.group.size if self.group else 1
        packed = pack(micro, multiple_of=multiple, predicted=self.packed)
        options: dict[str, Any] = {
            "temperature": temperature, "entropy": entropy, "fused": self.fused,
        }  # fmt: skip
        if not self.packed:
            where = (
                packed.rows_N,
                packed.columns_N + micro.input_ids_BT.shape[1] - packed.shape[1],
            )
            chosen_N = where[0] * (micro.input_ids_BT.shape[1] - 1) + where[1] - 1
            scores = model(
                input_ids=micro.input_ids_BT[:, :-1],
                position_ids=micro.position_ids_BT[:, :-1],
                attention_mask=micro.attention_mask_BT[:, :-1],
                chosen_N=chosen_N,
                labels_N=packed.labels_N,
                **options,
            )
            return _outputs(model, scores, packed)
        self.notes.append(packed.note)
        rows = rows_of(packed, group=self.group)
        if self.group is None:
            scores = model(
                input_ids=packed.input_ids_1T,
                position_ids=packed.position_ids_1T,
                chosen_N=packed.scored_N,
                labels_N=packed.labels_N,
                packed_rows=rows,
                **options,
            )
            return _outputs(model, scores, packed)
        return _outputs(model, self._shared(model, packed, rows, options), packed)

    def _shared(
        self, model: nn.Module, packed: Packed, rows: Rows, options: dict[str, Any]
    ) -> tuple[Tensor, ...]:
        """Scores of the whole line, each rank having computed those of its own tokens."""
        assert self.group is not None
        own = my_part(packed.input_ids_1T.shape[1], self.group)
        mine = (packed.scored_N >= own.start) & (packed.scored_N < own.stop)
        places = packed.scored_N[mine] - own.start
        scores = model(
            input_ids=packed.input_ids_1T[:, own],
            position_ids=packed.position_ids_1T[:, own],
            chosen_N=places,
            labels_N=packed.labels_N[mine],
            packed_rows=rows,
            **options,
        )
        line = torch.stack(scores, dim=-1)
        line = line.new_zeros((own.stop - own.start, line.shape[1])).index_put((places,), line)
        return gather_tokens(line, self.group)[packed.scored_N].unbind(-1)


def scored_forward(
    self: Any,
    input_ids: Tensor,
    position_ids: Tensor,
    chosen_N: Tensor,
    labels_N: Tensor,
    *,
    attention_mask: Tensor | None = None,
    temperature: float,
    entropy: bool,
    fused: bool,
    **attention: Any,
) -> tuple[Tensor, ...]:
    """Log-probs of ``labels_N`` (and entropies) f32[N], from the outputs at ``chosen_N``; of a
    token classifier its values there.

    ``self`` is a causal language model, or a token classifier, of transformers; ``chosen_N``
    counts over the flattened ``input_ids``.
    """
    hidden = self.model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        use_cache=False,
        **attention,
    ).last_hidden_state
    hidden_NH = hidden.flatten(0, 1)[chosen_N]
    if values_of(self):
        return (self.score(hidden_NH).float().sum(-1),)  # one column; FSDP warns of views
    if fused:
        scores = fused_scores(
            hidden_NH, self.lm_head.weight, labels_N, temperature=temperature, entropy=entropy
        )
    else:
        logits_NV = self.lm_head(hidden_NH)
        scores = plain_scores(logits_NV, labels_N, temperature=temperature, entropy=entropy)
    return tuple(score for score in scores if score is not None)


def check_family(model_type: str, *, keys: str, sliding_window: bool = False) -> None:
    """Raise DPA851 for a model whose output or attention this path does not know."""
    if model_type not in FAMILIES or sliding_window:
        what = "with a sliding window" if sliding_window else f"of type {model_type!r}"
        raise UsageError(
            "DPA851",
            f"{keys} is on, but the model is one {what}; known are {', '.join(FAMILIES)} with full "
            "attention.",
            "Switch it off for this model.",
        )


def values_of(model: nn.Module) -> bool:
    """Whether ``model`` is a token classifier, which gives values, and no language model."""
    return hasattr(model, "score") and not hasattr(model, "lm_head")


def _outputs(model: nn.Module, scores: tuple[Tensor, ...], packed: Packed) -> TokenOutputs:
    if values_of(model):
        return TokenOutputs.of_values(packed.spread(scores[0]))
    return TokenOutputs(*(packed.spread(score) for score in scores))
