"""The batch that layouts are compared on: from a file, completed where it lacks fields, or made."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dataproto_audit.codes import UsageError
from dataproto_audit.protocol import DataProto
from dataproto_audit.trainer.workers.inputs import FORWARD_FIELDS

LOSS_FIELDS = ("response_mask", "old_log_probs", "ref_log_prob", "advantages")
VALUE_FIELDS = ("values", "returns")
PROMPT, RESPONSE = 8, 10


def demo_batch(*, vocab_size: int, rows: int = 8, seed: int = 0) -> DataProto:
    """Left-padded prompts and right-padded responses of random tokens and ragged lengths; the last
    row trains nothing."""
    random = torch.Generator().manual_seed(seed)
    prompt = torch.randint(1, PROMPT + 1, (rows, 1), generator=random)
    response = torch.randint(1, RESPONSE + 1, (rows, 1), generator=random)
    columns = torch.arange(PROMPT + RESPONSE)[None]
    attended = (columns >= PROMPT - prompt) & (columns < PROMPT + response)
    ids = torch.randint(3, vocab_size, attended.shape, generator=random) * attended
    mask = attended[:, PROMPT:].long()
    mask[-1] = 0
    return DataProto.from_dict({
        "input_ids": ids,
        "attention_mask": attended.long(),
        "position_ids": (attended.long().cumsum(-1) - 1).clamp(min=0),
        "responses": ids[:, PROMPT:].clone(),
        "response_mask": mask,
    })  # fmt: skip


def from_tensors(
    tensors: Mapping[str, Tensor], *, rows: int, multiple_of: int, temperature: float
) -> DataProto:
    """The first rows of a saved batch that a comparison needs, as a DataProto.

    At most ``rows``, a multiple of ``multiple_of``. Raises DPA851 if the forward fields are not
    there or not padded, or there are too few rows.
    """
    missing = [name for name in FORWARD_FIELDS if name not in tensors]
    jagged = [name for name, tensor in tensors.items() if tensor.is_nested]
    if missing or jagged:
        what = f"lacks {', '.join(missing)}" if missing else f"holds jagged {', '.join(jagged)}"
        raise UsageError(
            "DPA851", f"the batch {what}.", "Give a padded batch from the stage update_actor."
        )
    count = len(tensors["input_ids"])
    count = min(count, rows) // multiple_of * multiple_of
    if not count:
        raise UsageError(
            "DPA854",
            f"{len(tensors['input_ids'])} rows; a layout cuts them into {multiple_of} parts.",
            f"Give {multiple_of} rows or more (--rows), or layouts with fewer data-parallel ranks.",
        )
    names = [n for n in (*FORWARD_FIELDS, *LOSS_FIELDS, *VALUE_FIELDS) if n in tensors]
    fields = {name: tensors[name][:count].clone() for name in names}
    for name in (*FORWARD_FIELDS, "response_mask"):
        if name in fields:
            fields[name] = fields[name].long()
    return DataProto.from_dict(fields, meta_info={"temperature": temperature})


def complete(batch: DataProto, log_probs: Tensor, *, seed: int = 0) -> list[str]:
    """Add the fields of the loss that ``batch`` lacks; returns their names.

    ``log_probs`` f[rows, response] of the model. Old and reference log-probs are those with noise,
    so that the clip is active and the KL is not zero; advantages are noise, one a row; old values
    and returns are noise, too.
    """
    random = torch.Generator().manual_seed(seed)
    tensors, made = batch.batch, []
    attended = tensors["attention_mask"][:, -tensors["responses"].shape[1] :]

    def noise(scale: float) -> Tensor:
        drawn: Tensor = torch.randn(attended.shape, generator=random) * scale * attended
        return drawn

    wanted: dict[str, Callable[[], Tensor]] = {
        "response_mask": lambda: attended.clone(),
        "old_log_probs": lambda: log_probs.float() + noise(0.3),
        "ref_log_prob": lambda: log_probs.float() + noise(0.3),
        "advantages": lambda: noise(1.0)[:, :1] * tensors["response_mask"],
        "values": lambda: noise(1.0),
        "returns": lambda: noise(1.0),
    }
    for name, make in wanted.items():
        if name not in tensors:
            tensors[name] = make()
            made.append(name)
    for name in ("old_log_probs", "ref_log_prob", "advantages", *VALUE_FIELDS):
        tensors[name] = tensors[name].float()
    return made
