"""Log-probs and gradients from transformers' own model, in one process and without a backend.

The forward runs in the model's dtype (float32 from :func:`load_model`), everything after the
logits in float64. Convention: column t of a result scores ``responses[:, t]``, given everything
before it. Text models with one position channel only.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from dataproto_audit.reference.losses import LossTerms, policy_loss
from dataproto_audit.reference.masks import response_attention
from dataproto_audit.reference.shapes import Exact, WideMask, as_bool, checked

Ids = Integer[Tensor, "rows total"]


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "eager",
    device: str | torch.device = "cpu",
) -> nn.Module:
    """The causal language model of a local folder, in evaluation mode. Needs transformers.

    Only files of the folder are read: no download, no code from the folder. A lower ``dtype``
    shows what precision alone does to log-probs.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: float64, which transformers only pretends to do: norms and the eager softmax
            run in float32, where the rows of left padding overflow to NaN.
    """
    if dtype == torch.float64:
        raise ValueError("transformers' models do not run in float64; use float32")
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"no model in {folder}: config.json is missing")
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        str(folder),
        dtype=dtype,
        attn_implementation=attn_implementation,
        local_files_only=True,
        trust_remote_code=False,
    )
    drop_negative_padding(model)
    return model.to(device).eval()


def drop_negative_padding(model: Any) -> None:
    """A ``pad_token_id`` of -1, as old Llamas have, is no token: transformers alone would take the
    last one for it and keep its embedding without gradient."""
    if getattr(model.config, "pad_token_id", None) == -1:
        model.get_input_embeddings().padding_idx = None


@checked
def token_log_probs(
    model: nn.Module,
    input_ids: Ids,
    attention_mask: WideMask,
    position_ids: Ids,
    response_width: int,
    *,
    temperature: float = 1.0,
    rows_per_forward: int | None = None,
) -> tuple[Exact, Exact]:
    """Log-prob of each response token and entropy of its distribution, without gradients.

    Both float64 [rows, response], 0 where the response is not attended. Logits are divided by
    ``temperature`` first, as the sampler does. ``rows_per_forward`` bounds memory (default: all
    rows at once); the result does not depend on it beyond float32 rounding.

    Raises:
        ValueError: a temperature or row count that is not positive, or a response as wide as the
            whole row.
    """
    if rows_per_forward is not None and rows_per_forward < 1:
        raise ValueError(f"rows_per_forward must be positive, not {rows_per_forward}")
    rows = input_ids.shape[0]
    step = rows if rows_per_forward is None else rows_per_forward
    log_probs = torch.zeros(rows, response_width, dtype=torch.float64, device=input_ids.device)
    entropy = torch.zeros_like(log_probs)
    with torch.no_grad():
        for start in range(0, rows, max(step, 1)):
            part = slice(start, start + step)
            log_probs[part], entropy[part] = _score(
                model,
                input_ids[part],
                attention_mask[part],
                position_ids[part],
                response_width,
                temperature,
            )
    return log_probs, entropy


@checked
def label_log_probs(
    logits: Float[Tensor, "rows response vocabulary"],
    labels: Integer[Tensor, "rows response"],
    *,
    temperature: float = 1.0,
) -> tuple[Exact, Exact]:
    """log softmax(logits / temperature) at the labels, and that distribution's entropy, float64.

    ``logits[:, t]`` must predict ``labels[:, t]``: the shift is the caller's.

    Raises:
        ValueError: a temperature that is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    log_p = (logits.double() / temperature).log_softmax(dim=-1)
    chosen = log_p.gather(-1, labels[..., None].long())[..., 0]
    # A logit of -inf has p = 0 and adds nothing, where 0 * -inf would be NaN.
    finite = log_p.masked_fill(log_p == -torch.inf, 0.0)
    return chosen, -(log_p.exp() * finite).sum(dim=-1)


def _score(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    response_width: int,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Differentiable log-probs and entropies [rows, response], 0 off the response's attention."""
    attended = as_bool(response_attention(attention_mask, response_width))
    with _evaluating(model):
        output = model(
            input_ids=input_ids,
            attention_mask=attention_mask.long(),
            position_ids=position_ids,
            use_cache=False,
        )
    # The logits at position s predict token s + 1.
    logits = output.logits[:, -response_width - 1 : -1]
    labels = input_ids[:, -response_width:]
    log_probs, entropy = label_log_probs(logits, labels, temperature=temperature)
    return torch.where(attended, log_probs, 0.0), torch.where(attended, entropy, 0.0)


def grad_of_loss(
    model: nn.Module, batch: Mapping[str, Tensor], *, temperature: float = 1.0, **loss_options: Any
) -> tuple[dict[str, Tensor], LossTerms]:
    """Gradient of the total loss of one mini-batch, unsplit, by parameter name, and its terms.

    ``batch`` holds input_ids, attention_mask, position_ids [rows, prompt + response], and
    response_mask, old_log_probs, advantages [rows, response]; ref_log_prob and rollout_is_weights
    are used when present. ``loss_options`` are those of
    :func:`dataproto_audit.reference.losses.policy_loss`. Gradients have the parameters' dtype; a
    parameter that the loss does not reach gets zeros; a tied parameter appears once. The ``grad``
    attributes of the model are left alone, dropout is off.

    Raises:
        KeyError: a needed field is missing.
    """
    log_probs, entropy = _score(
        model,
        batch["input_ids"],
        batch["attention_mask"],
        batch["position_ids"],
        batch["response_mask"].shape[1],
        temperature,
    )
    terms = policy_loss(
        log_probs,
        batch["old_log_probs"],
        batch["advantages"],
        batch["response_mask"],
        entropy=entropy,
        ref_log_prob=batch.get("ref_log_prob"),
        rollout_is_weights=batch.get("rollout_is_weights"),
        **loss_options,
    )
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(
        terms["total"], parameters, allow_unused=True, materialize_grads=True
    )
    detached = {name: cast(Tensor, value).detach() for name, value in terms.items()}
    return dict(zip(names, gradients, strict=True)), cast(LossTerms, detached)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off inside, the model's own mode restored after."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
