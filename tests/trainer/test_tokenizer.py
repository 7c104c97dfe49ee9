import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.tokenizer import load_tokenizer, write_char_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_char_tokenizer(folder, "ascii", max_length=64)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


@given(st.text(string.printable[:95] + "\n", max_size=30))
def test_characters_come_back(tokenizer, text):
    ids = tokenizer.encode(text, special=False)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text) == [tokenizer.bos_id, *ids]


def test_special_ids(tokenizer):
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    assert tokenizer.stop_ids == (2,)
    assert tokenizer.decode([1, 2, 0]) == ""
    assert tokenizer.decode([2], skip_special=False) == "<eos>"


def test_batches_are_rows_of_their_own(tokenizer):
    texts = ["1+1=", "", "abc"]
    ids = tokenizer.encode_batch(texts)
    assert ids == [tokenizer.encode(text) for text in texts]
    assert tokenizer.decode_batch(ids) == texts


def test_ids_beyond_the_vocabulary_decode_to_nothing(tokenizer):
    assert tokenizer.decode([len(tokenizer) + 5, *tokenizer.encode("7")]) == "7"


def test_unknown_characters_are_told(tokenizer):
    assert tokenizer.unk_id in tokenizer.encode("é")
    assert tokenizer.unknown_in("é=ü") == ["é", "ü"]


def test_the_chat_template_marks_roles(tokenizer):
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids, skip_special=False) == "<bos><|user|>hi<|assistant|>"


def test_transformers_agrees(folder, tokenizer):
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(folder)
    for text in ("5+3=", "a\nb", ""):
        assert other(text)["input_ids"] == tokenizer.encode(text)
    assert (other.pad_token_id, other.eos_token_id, len(other)) == (0, 2, len(tokenizer))


def copied(folder, tmp_path, **changes):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return tmp_path


def test_a_folder_of_another_class_goes_through_transformers(folder, tokenizer, tmp_path):
    other = load_tokenizer(copied(folder, tmp_path, tokenizer_class="Qwen2TokenizerFast"))
    assert other.eos_id == tokenizer.eos_id
    assert len(other) >= len(tokenizer)
    assert other.encode_batch(["12"], special=False) == [other.encode("12", special=False)]
    assert other.decode_batch([other.encode("12", special=False)]) == ["12"]


def test_without_a_template_a_chat_is_refused(folder, tmp_path):
    plain = load_tokenizer(copied(folder, tmp_path, chat_template=None))
    with pytest.raises(UsageError, match=r"DPA852.*no chat template"):
        plain.encode_chat([{"role": "user", "content": "hi"}])


def test_a_template_that_raises_is_told(folder, tmp_path):
    strict = copied(folder, tmp_path, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UsageError, match=r"DPA852.*roles must alternate"):
        load_tokenizer(strict).encode_chat([{"role": "user", "content": "hi"}])


def test_without_a_pad_token_the_end_token_pads(folder, tmp_path):
    assert load_tokenizer(copied(folder, tmp_path, pad_token=None)).pad_id == 2


def test_without_an_end_token_nothing_goes(folder, tmp_path):
    with pytest.raises(UsageError, match=r"DPA852.*end-of-sequence"):
        load_tokenizer(copied(folder, tmp_path, eos_token=None))


def test_generation_config_adds_stop_ids(folder, tmp_path):
    copied(folder, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    assert load_tokenizer(tmp_path).stop_ids == (2, 5)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 4}')
    assert load_tokenizer(tmp_path).stop_ids == (2, 4)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_broken_files_are_named(folder, tmp_path, name):
    copied(folder, tmp_path)
    (tmp_path / name).write_text("{")
    with pytest.raises(UsageError, match="DPA852") as error:
        load_tokenizer(tmp_path)
    assert name in error.value.message


def test_a_folder_that_transformers_cannot_read_is_an_error(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "NoSuchTokenizer"}')
    with pytest.raises(UsageError, match=r"DPA852.*cannot be loaded"):
        load_tokenizer(tmp_path)


def test_a_missing_transformers_says_what_to_install(folder, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"DPA858.*dataproto-audit\[trainer\]"):
        load_tokenizer(folder).encode_chat([{"role": "user", "content": "hi"}])
