"""Files that nest their rows, taken apart into one flat mapping a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from dataproto_audit._protocol.safe.errors import TooLargeError
from dataproto_audit.dump.readers.tables import Row

_SHARED = 64
"""How often the branches of one trace may repeat its nodes."""


def nemo_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """NeMo-RL: a line is a micro-batch, every value a list with one entry a row."""
    for line in rows:
        counts = {len(value) for value in line.values() if isinstance(value, list)}
        if len(counts) != 1:
            raise ValueError("the lists of a line have different numbers of rows")
        for place in range(counts.pop()):
            yield {
                name: value[place] if isinstance(value, list) else value
                for name, value in line.items()
            }


def prime_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """prime-rl: a line is an episode with traces, a trace a tree of nodes; one row a branch.

    The prompt is what comes before the first sampled node. Lists with one value for each trained
    token are spread over the mask; one that is too short or too long gives a row that is.
    """
    for episode in rows:
        for trace in episode["traces"]:
            nodes = trace["nodes"]
            parents = {node.get("parent") for node in nodes}
            length = 0
            for leaf in (i for i in range(len(nodes)) if i not in parents):
                branch = _branch(nodes, leaf)
                length += len(branch)
                if length > 1000 + _SHARED * len(nodes):
                    raise TooLargeError("the branches of a trace repeat its nodes too often")
                row = _prime_row(branch, episode, trace)
                yield {**row, "episode": episode.get("id"), "nodes": len(branch)}


def _branch(nodes: Sequence[Row], leaf: int) -> list[Row]:
    branch: list[Row] = []
    place: int | None = leaf
    while place is not None:
        if len(branch) > len(nodes):
            raise ValueError("the nodes of a trace form a circle")
        branch.append(nodes[place])
        place = nodes[place].get("parent")
    return branch[::-1]


_SPREAD = ("logprobs", "advantages", "reference_logprobs", "trainer_logprobs", "entropies")


def _prime_row(branch: Sequence[Row], episode: Row, trace: Row) -> Row:
    first = next((i for i, node in enumerate(branch) if node.get("sampled")), len(branch))
    prompt, response = branch[:first], branch[first:]
    row: Row = {
        "prompt_tokens": [token for node in prompt for token in node["token_ids"]],
        "response_tokens": [token for node in response for token in node["token_ids"]],
        "mask": [bool(bit) for node in response for bit in node["mask"]],
        "raw_prompt": [node["message"] for node in prompt if "message" in node],
        "uid": (episode.get("group") or {}).get("id"),
        "env": (episode.get("env") or {}).get("id"),
        "answer": (episode.get("task") or {}).get("data", {}).get("answer"),
        "rewards": trace.get("rewards"),
        "finish_reason": trace.get("stop_condition"),
        "trace": trace.get("id"),
    }
    rewards = (trace.get("rewards") or {}).values()
    row["score"] = sum(reward["score"] * reward.get("weight", 1.0) for reward in rewards)
    for name in _SPREAD:
        if any(name in node for node in response):
            row[name] = [v for node in response for v in _spread(node.get(name) or [], node)]
    return row


def _spread(values: Sequence[Any], node: Row) -> list[Any]:
    out: list[Any] = []
    taken = 0
    for bit in node["mask"]:
        if not bit:
            out.append(0.0)
        elif taken < len(values):
            out.append(values[taken])
            taken += 1
    return out + list(values[taken:])


def experience_rows(saved: Mapping[Any, Any]) -> Iterator[Row]:
    """OpenRLHF: an ``Experience``, whose tensors and lists have one entry a row."""
    flat = dict(saved)
    info = flat.pop("info", None)
    flat.update({f"info.{k}": v for k, v in info.items()} if isinstance(info, Mapping) else {})
    attended = flat["attention_mask"]
    rows = int(attended.size(0))
    reach = attended.shape[1] - torch.argmax(attended.flip(1).int(), dim=1)
    flat["attended"] = torch.where(attended.any(dim=1), reach, 0)
    listed = {name: _listed(value) for name, value in flat.items()}
    for place in range(rows):
        yield {
            str(name): values[place]
            for name, values in listed.items()
            if isinstance(values, list) and len(values) == rows
        }


def sample_rows(saved: Mapping[Any, Any]) -> Iterator[Row]:
    """slime: a dictionary with one mapping a sample, and the raw rewards of the whole batch."""
    raw = saved.get("raw_reward")
    for sample in saved["samples"]:
        row = {str(name): _listed(value) for name, value in sample.items()}
        place = row.get("rollout_position")
        if isinstance(raw, list) and isinstance(place, int) and 0 <= place < len(raw):
            row["raw_reward"] = raw[place]
        yield row


def _listed(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value
