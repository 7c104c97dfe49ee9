"""Values and the gradient of the value loss from transformers' own token classifier, one process.

The forward runs in the model's dtype, everything after it in float64. Convention: column t of a
result is the value of the state before ``responses[:, t]``, that is after everything to its left.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dataproto_audit.reference.logprobs import drop_negative_padding
from dataproto_audit.reference.losses import TOKEN_MEAN, aggregate
from dataproto_audit.reference.masks import response_attention
from dataproto_audit.reference.shapes import Mask, Scalar, Tokens, as_bool, checked


def load_value_model(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "eager",
) -> nn.Module:
    """The folder's model with one value at each position, in evaluation mode and without dropout.

    The folder is that of a token classifier with one label, or of a causal language model, whose
    value head then is 0 everywhere. Only files of the folder are read.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"no model in {folder}: config.json is missing")
    from transformers import AutoConfig, AutoModelForTokenClassification
    from transformers.utils import logging

    config: Any = AutoConfig.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False
    )
    config.num_labels, config.classifier_dropout = 1, 0.0
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # that a language model has no value head is no news
    try:
        model, told = AutoModelForTokenClassification.from_pretrained(
            str(folder),
            dtype=dtype,
            config=config,
            attn_implementation=attn_implementation,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    finally:
        logging.set_verbosity(level)
    if "score.weight" in told["missing_keys"]:
        with torch.no_grad():
            model.score.weight.zero_()
            model.score.bias.zero_()
    drop_negative_padding(model)
    loaded: nn.Module = model.eval()
    return loaded


def token_values(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    rows_per_forward: int | None = None,
) -> Tensor:
    """float64[rows, response] without gradients, 0 where the response is not attended.

    ``batch`` holds input_ids, attention_mask, position_ids and responses.
    """
    rows = len(batch["input_ids"])
    step = rows_per_forward or max(rows, 1)
    with torch.no_grad():
        parts = [
            _values(model, {name: batch[name][start : start + step] for name in _FIELDS})
            for start in range(0, rows, step)
        ]
    return torch.cat(parts)


_FIELDS = ("input_ids", "attention_mask", "position_ids", "responses")


def _values(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    width = batch["responses"].shape[1]
    attended = as_bool(response_attention(batch["attention_mask"], width))
    given = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"].long(),
        position_ids=batch["position_ids"],
        use_cache=False,
    ).logits[..., 0]
    return torch.where(attended, given[:, -width - 1 : -1].double(), 0.0)


def grad_of_value_loss(
    model: nn.Module, batch: Mapping[str, Tensor], *, clip: float
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradient of the token mean of PPO's clipped value loss, by parameter name, and the loss.

    ``max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2``, averaged over the response mask;
    0 on an empty mask. ``batch`` also holds response_mask, ``values`` (v_old) and ``returns``.
    """
    values = _values(model, batch)
    old, returns = batch["values"].double(), batch["returns"].double()
    held = old + (values - old).clamp(-clip, clip)
    worse = torch.maximum((values - returns).square(), (held - returns).square())
    mask = as_bool(batch["response_mask"])
    loss = torch.where(mask, worse, 0.0).sum() / (2 * max(int(mask.sum()), 1))
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return dict(zip(names, gradients, strict=True)), loss.detach()


@checked
def value_loss(
    values: Tokens,
    old_values: Tokens,
    returns: Tokens,
    response_mask: Mask,
    *,
    clip: float,
    loss_agg_mode: str = TOKEN_MEAN,
) -> Scalar:
    """PPO's clipped value loss of a whole mini-batch, float64: :func:`grad_of_value_loss`'s terms,
    aggregated as ``loss_agg_mode`` says (:func:`.losses.aggregate`).

    Raises:
        ValueError: unknown mode.
    """
    exact, old, wanted = values.double(), old_values.double(), returns.double()
    held = old + (exact - old).clamp(-clip, clip)
    worse = torch.maximum((exact - wanted).square(), (held - wanted).square()) / 2
    return aggregate(worse, response_mask, loss_agg_mode)
