"""What the stand-ins share: a model whose log-probs depend on the row's own ids and positions."""

import torch


class Toy(torch.nn.Module):
    """Logits f32[1 or B, T, 8] of the token and its position."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.table = torch.nn.Parameter(torch.randn(64, 64, generator=generator))

    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=False):
        """Logits."""
        turned = self.table.roll(1, 0)[position_ids % 64]
        return self.table[input_ids % 64] * 0.5 + turned * 0.1


def cut(batch, *, rows, tokens):
    """Row numbers of micro-batches: ``rows`` each, or up to ``tokens``."""
    lengths = batch["attention_mask"].sum(1).tolist()
    if tokens is None:
        return [list(range(i, min(i + rows, len(lengths)))) for i in range(0, len(lengths), rows)]
    parts, held = [[]], 0
    for row in sorted(range(len(lengths)), key=lambda r: -lengths[r]):
        if parts[-1] and held + lengths[row] > tokens:
            parts, held = [*parts, []], 0
        parts[-1].append(row)
        held += lengths[row]
    return parts


def picked(logits, ids):
    """Log-probs f32[T-1] of the next ids."""
    return torch.log_softmax(logits[:-1], -1).gather(-1, (ids[1:] % 64)[:, None])[:, 0]


def padded_log_probs(model, micro):
    """Log-probs f32[B,R] of padded rows."""
    width = micro["responses"].shape[1]
    logits = model(micro["input_ids"], attention_mask=micro["attention_mask"],
                   position_ids=micro["position_ids"])  # fmt: skip
    rows = [picked(out, i)[-width:] for out, i in zip(logits, micro["input_ids"], strict=True)]
    return torch.stack(rows)


def packed_log_probs(model, micro):
    """The same of rows that run as one, without padding."""
    keep = micro["attention_mask"] != 0
    ids, positions = micro["input_ids"][keep], micro["position_ids"][keep]
    logits = model(input_ids=ids[None], attention_mask=None, position_ids=positions[None])[0]
    width, out, start = micro["responses"].shape[1], [], 0
    for length, response in zip(keep.sum(1).tolist(), keep[:, -width:].sum(1).tolist(),
                                strict=True):  # fmt: skip
        part = slice(start, start + length)
        values = picked(logits[part], ids[part])[length - 1 - response :]
        out.append(torch.nn.functional.pad(values, (0, width - response)))
        start += length
    return torch.stack(out)
