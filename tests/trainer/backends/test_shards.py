import numpy as np
import pytest
import torch

from dataproto_audit.trainer.backends.shards import (
    ShardSpec,
    add_checksums,
    checksum,
    fill,
    join,
    pack,
    payload_checksums,
)


def cut(whole: dict[str, torch.Tensor], world: int):
    """Pieces of every rank as FSDP cuts them: chunks of ceil(rows / world) along dimension 0."""
    ranks = []
    for rank in range(world):
        pieces = {}
        for name, tensor in whole.items():
            rows = -(-tensor.shape[0] // world)
            start = min(rank * rows, tensor.shape[0])
            spec = ShardSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), start)
            pieces[name] = (tensor[start : start + rows], spec)
        buffer = torch.arange(3.0)
        pieces["buffer"] = (buffer, ShardSpec((3,), "float32", 0, True))
        ranks.append(pieces)
    return ranks


@pytest.fixture
def whole():
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(5, 3, generator=generator),
        "norm": torch.randn(1, generator=generator),
        "half": torch.randn(4, 2, generator=generator).bfloat16(),
    }


def payloads(whole, world, version=7):
    return [
        pack(pieces, rank=rank, world_size=world, version=version, aliases={"head": "matrix"})
        for rank, pieces in enumerate(cut(whole, world))
    ]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_joined_pieces_are_the_whole_bit_for_bit(whole, world):
    joined = join(payloads(whole, world)[::-1], aliases=True)
    for name, tensor in whole.items():
        assert joined[name].dtype == tensor.dtype
        assert torch.equal(joined[name], tensor)
    assert torch.equal(joined["head"], whole["matrix"])
    assert torch.equal(joined["buffer"], torch.arange(3.0))


def test_joined_tensors_are_writable_copies(whole):
    parts = payloads(whole, 1)
    for array in parts[0].arrays.values():
        array.setflags(write=False)
    join(parts)["matrix"].zero_()
    assert whole["matrix"].any()


def test_missing_ranks_and_mixed_versions_are_refused(whole):
    first, second = payloads(whole, 2)
    with pytest.raises(ValueError, match="of 2 ranks"):
        join([second])
    with pytest.raises(ValueError, match="of 0 ranks"):
        join([])
    with pytest.raises(ValueError, match=r"versions \[7, 8\]"):
        join([first, payloads(whole, 2, version=8)[1]])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_checksums_of_pieces_add_up_to_that_of_the_whole(whole, world):
    total = add_checksums([payload_checksums(payload) for payload in payloads(whole, world)])
    assert total == {name: checksum(t) for name, t in join(payloads(whole, world)).items()}


def test_a_checksum_tells_values_bits_and_positions_apart(whole):
    matrix = whole["matrix"]
    changed = matrix.clone()
    changed.view(torch.int32)[2, 1] ^= 1
    sums = {
        checksum(matrix),
        checksum(changed),
        checksum(matrix.flip(0)),
        checksum(-matrix),
        checksum(torch.zeros(15)),
    }
    assert len(sums) == 5
    assert checksum(torch.from_numpy(np.zeros(0, np.float32))) == 0


def columns_and_groups():
    """Two ranks: a matrix cut by columns, one whose rows come in groups, a bias, and a copy."""
    generator = torch.Generator().manual_seed(1)
    whole = {
        "columns": torch.randn(4, 6, generator=generator),
        "odd": torch.randn(3, 5, generator=generator),
        "grouped": torch.randn(8, 3, generator=generator),
        "bias": torch.randn(8, generator=generator),
        "norm": torch.randn(3, generator=generator),
        "last": torch.randn(3, generator=generator),
    }
    ranks = []
    for rank in range(2):
        fused = whole["grouped"].reshape(4, 2, 3)[2 * rank : 2 * rank + 2]
        fused = torch.cat([fused, torch.zeros(2, 1, 3)], 1)[:, :2]
        start = (0, 2)[rank]
        pieces = {
            "columns": (
                whole["columns"][:, 3 * rank : 3 * rank + 3],
                ShardSpec((4, 6), "float32", 3 * rank, dim=1),
            ),
            "odd": (
                whole["odd"][:, start : (2, 5)[rank]],
                ShardSpec((3, 5), "float32", start, dim=1),
            ),
            "grouped": (fused, ShardSpec((8, 3), "float32", 4 * rank)),
            "bias": (
                whole["bias"].reshape(4, 2)[2 * rank : 2 * rank + 2],
                ShardSpec((8,), "float32", 4 * rank),
            ),
            "norm": (whole["norm"], ShardSpec((3,), "float32", copy=rank == 1)),
        }
        if rank:
            pieces["last"] = (whole["last"], ShardSpec((3,), "float32"))
        ranks.append(pieces)
    return whole, ranks


def test_columns_groups_and_copies_make_up_the_whole():
    whole, ranks = columns_and_groups()
    sent = [
        pack(pieces, rank=rank, world_size=2, version=0, aliases={})
        for rank, pieces in enumerate(ranks)
    ]
    assert "norm" not in sent[1].arrays
    joined = join(sent)
    assert joined.keys() == whole.keys()
    assert all(torch.equal(joined[name], tensor) for name, tensor in whole.items())
    total = add_checksums([payload_checksums(payload) for payload in sent])
    assert total == {name: checksum(tensor) for name, tensor in whole.items()}
    del sent[0].arrays["columns"]
    with pytest.raises(ValueError, match=r"columns: pieces of 12 values"):
        join(sent)


def test_every_piece_can_be_filled_from_the_whole():
    whole, ranks = columns_and_groups()
    for pieces in ranks:
        for name, (piece, spec) in pieces.items():
            target = torch.zeros_like(piece)
            fill(target, spec, whole[name])
            assert torch.equal(target, piece), name
