import json

import pytest
import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends import checkpoint

LAYOUT = {"strategy": "fsdp2"}


def write(folder, ranks=2):
    files = [
        checkpoint.write_rank_file(
            folder, rank=rank, tensors={"a": torch.full((2,), float(rank)), "n": torch.tensor(3)}
        )
        for rank in range(ranks)
    ]
    checkpoint.write_index(folder, files, step=5, layout=LAYOUT, extra={"reward": 0.5})


def read(folder):
    return checkpoint.read_index(folder)


def test_what_was_written_comes_back(tmp_path):
    write(tmp_path / "new" / "folder")
    index = read(tmp_path / "new" / "folder")
    assert (index.step, index.layout, index.extra) == (5, LAYOUT, {"reward": 0.5})
    tensors = checkpoint.read_rank_file(tmp_path / "new" / "folder", index.files[1])
    assert torch.equal(tensors["a"], torch.ones(2))
    assert int(tensors["n"]) == 3
    assert not list((tmp_path / "new" / "folder").glob(".*"))


def test_tensors_that_share_memory_are_saved_apart(tmp_path):
    base = torch.arange(4.0)
    entry = checkpoint.write_rank_file(tmp_path, rank=0, tensors={"a": base, "b": base[1:3]})
    tensors = checkpoint.read_rank_file(tmp_path, entry)
    assert torch.equal(tensors["b"], base[1:3])


def test_ranks_and_layout_tell_whether_each_rank_has_a_file_of_its_own(tmp_path):
    write(tmp_path)
    index = read(tmp_path)
    assert index.fits(world_size=2, layout=LAYOUT)
    assert not index.fits(world_size=4, layout=LAYOUT)
    assert not index.fits(world_size=2, layout={"strategy": "megatron"})


def test_a_layout_that_nothing_is_known_of_is_refused(tmp_path):
    file = checkpoint.write_rank_file(tmp_path, rank=0, tensors={"a": torch.zeros(2)})
    checkpoint.write_index(tmp_path, [file] * 2, step=5, layout={"strategy": "zero3"}, extra={})
    with pytest.raises(UsageError, match=r"DPA804 .*layout {'strategy': 'zero3'} and 2 ranks"):
        read(tmp_path)


@pytest.mark.parametrize(
    "layout",
    [
        {"strategy": "megatron", "tp": 2},
        {"strategy": "fsdp2", "ref_strategy": "megatron"},
        {"strategy": "fsdp2", "critic_strategy": "megatron"},
    ],
)
def test_megatron_files_that_do_not_say_where_their_ranks_sat_are_refused(tmp_path, layout):
    entry = checkpoint.write_rank_file(tmp_path, rank=0, tensors={"a": torch.zeros(2)})
    checkpoint.write_index(tmp_path, [entry], step=5, layout=layout, extra={})
    with pytest.raises(UsageError, match=r"DPA804 .*earlier version") as caught:
        read(tmp_path)
    assert "start the run again" in str(caught.value)
    seated = layout | {checkpoint.SEATS: True}
    checkpoint.write_index(tmp_path, [entry], step=5, layout=seated, extra={})
    assert read(tmp_path).layout == seated


def test_a_change_of_the_index_is_noticed_and_an_index_without_a_checksum_is_read(tmp_path):
    write(tmp_path)
    file = tmp_path / checkpoint.INDEX
    changed = file.read_text().replace("fsdp2", "megatron")
    file.write_text(changed)
    with pytest.raises(UsageError, match=r"DPA804 .*not the file that was written"):
        read(tmp_path)
    write(tmp_path)
    raw = json.loads(file.read_text())
    del raw["crc32"]  # as earlier versions wrote it
    file.write_text(json.dumps(raw))
    assert read(tmp_path).step == 5


def test_a_checkpoint_without_index_was_not_finished(tmp_path):
    write(tmp_path)
    (tmp_path / checkpoint.INDEX).unlink()
    with pytest.raises(UsageError, match=r"DPA804 .*not finished"):
        read(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema": 99}', '{"schema": 1, "step": 2}'])
def test_an_unusable_index_is_refused(tmp_path, text):
    write(tmp_path)
    (tmp_path / checkpoint.INDEX).write_text(text)
    with pytest.raises(UsageError, match="DPA804"):
        read(tmp_path)


def test_a_missing_or_cut_rank_file_is_noticed_before_any_rank_reads_it(tmp_path):
    write(tmp_path)
    file = tmp_path / "rank_0001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UsageError, match=r"DPA804 .*rank_0001"):
        read(tmp_path)
    file.unlink()
    with pytest.raises(UsageError, match=r"DPA804 .*rank_0001"):
        read(tmp_path)


def test_a_flipped_bit_is_noticed(tmp_path):
    write(tmp_path)
    index = read(tmp_path)
    file = tmp_path / index.files[0].name
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(UsageError, match=r"DPA804 .*not the file that was written"):
        checkpoint.read_rank_file(tmp_path, index.files[0])


def test_a_file_that_is_no_safetensors_is_refused_though_its_crc_fits(tmp_path):
    import zlib

    data = b"\x80\x04not a tensor file"
    (tmp_path / "x").write_bytes(data)
    entry = checkpoint.RankFile("x", len(data), zlib.crc32(data))
    with pytest.raises(UsageError, match=r"DPA804 .*x"):
        checkpoint.read_rank_file(tmp_path, entry)


def test_writing_again_makes_the_old_index_invalid_first(tmp_path):
    write(tmp_path)
    checkpoint.begin(tmp_path)
    with pytest.raises(UsageError, match=r"DPA804 .*not finished"):
        read(tmp_path)


def test_the_index_is_plain_json(tmp_path):
    write(tmp_path)
    assert json.loads((tmp_path / checkpoint.INDEX).read_text())["world_size"] == 2


def test_files_are_compared_with_the_index_without_being_opened(tmp_path):
    write(tmp_path)
    index = read(tmp_path)
    checkpoint.verify_files(tmp_path, index.files)
    file = tmp_path / index.files[1].name
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(UsageError, match=r"DPA804 .*rank_0001\.safetensors is not the file"):
        checkpoint.verify_files(tmp_path, index.files)
    file.unlink()
    with pytest.raises(UsageError, match=r"DPA804 .*rank_0001"):
        checkpoint.verify_files(tmp_path, index.files)
