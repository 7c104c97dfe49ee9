"""A store of one process: fields by partition and key, rows of any length."""

import torch

STORE: dict[str, dict[str, dict]] = {}
READS: list[tuple[str, ...]] = []


class KVBatchMeta:
    """Keys and tags."""

    def __init__(self, keys, tags, partition_id) -> None:
        self.keys, self.tags, self.partition_id = list(keys), list(tags), partition_id
        self.extra_info = {}

    def __len__(self) -> int:
        return len(self.keys)

    def reorder(self, order):
        """In place."""
        self.keys = [self.keys[row] for row in order]
        self.tags = [self.tags[row] for row in order]

    def select_keys(self, keys):
        """Some of the rows."""
        tags = dict(zip(self.keys, self.tags, strict=True))
        return KVBatchMeta(keys, [tags[key] for key in keys], self.partition_id)


def kv_batch_put(keys, partition_id, fields):
    """``fields`` hold one item for each key."""
    part = STORE.setdefault(partition_id, {})
    for row, key in enumerate(keys):
        part.setdefault(key, {}).update({name: items[row] for name, items in fields.items()})


def kv_batch_get(keys, partition_id, select_fields=None):
    """Tensors jagged, objects as lists."""
    READS.append(tuple(keys))
    rows = [STORE[partition_id][key] for key in keys]
    names = set.intersection(*(set(row) for row in rows))
    found = {}
    for name in sorted(names if select_fields is None else names & set(select_fields)):
        items = [row[name] for row in rows]
        if isinstance(items[0], torch.Tensor):
            found[name] = torch.nested.nested_tensor(items, layout=torch.jagged)
        else:
            found[name] = items
    return found


def kv_clear(keys, partition_id):
    """Forget these rows."""
    for key in keys:
        del STORE[partition_id][key]
