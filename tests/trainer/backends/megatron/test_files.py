"""Model folders that are not whole: each is a DPA852 with what is wrong."""

import pytest
import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.backends.megatron.files import open_weights, read_config


def test_a_config_that_is_no_object_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(UsageError, match=r"DPA852 .*config.json holds no object"):
        read_config(tmp_path)


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
    torch.save([torch.ones(2)], tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match="holds no weights by name"), open_weights(tmp_path):
        pass
