"""Model folders that are not whole: each is a DPA852 with what is wrong."""

import json

import pytest
import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends.megatron.files import open_weights


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut off"])
def test_a_weights_file_that_cannot_be_read_is_refused(tmp_path, content):
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with (
        pytest.raises(UsageError, match=r"DPA852 .*pytorch_model.bin cannot be read"),
        open_weights(tmp_path),
    ):
        pass


def test_weights_are_read_by_name(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    with open_weights(tmp_path) as read:
        assert read("a").tolist() == [1, 1]
    torch.save({"b": torch.ones(2)}, tmp_path / "pytorch_model-old.bin")  # none of the model's
    with open_weights(tmp_path) as read, pytest.raises(UsageError, match="no weight b"):
        read("b")
    torch.save([torch.ones(2)], tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match="holds no weights by name"), open_weights(tmp_path):
        pass


def test_torch_s_shards_are_those_of_the_index(tmp_path):
    for name in "ab":
        torch.save({name: torch.ones(2)}, tmp_path / f"{name}.bin")
    listed = {"weight_map": {"a": "a.bin", "b": "b.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(listed))
    with open_weights(tmp_path) as read:
        assert read("a").tolist() == read("b").tolist() == [1, 1]
    (tmp_path / "b.bin").unlink()
    with pytest.raises(UsageError, match=r"DPA852 .*missing: b\.bin"), open_weights(tmp_path):
        pass
