"""Rows cut into mini-batches."""


def make_iterator(tensordict, mini_batch_size):
    """One after the other, in order."""
    for start in range(0, len(tensordict), mini_batch_size):
        yield tensordict.rows(list(range(start, start + mini_batch_size)))
