import numpy as np
import pytest
from omegaconf import OmegaConf

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.data import open_data, warmup_batch
from dataproto_audit.trainer.schema import DataConfig
from dataproto_audit.trainer.tokenizer import load_tokenizer, write_char_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_char_tokenizer(folder, "ascii", max_length=64)
    return load_tokenizer(folder)


def section(**changes):
    config = OmegaConf.structured(DataConfig)
    digits = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    base = {
        "generator": "chain_sum", "generator_args": digits, "prompt_style": "expression",
        "max_prompt_length": 6, "max_response_length": 4, "train_batch_size": 5,
        "val_batch_size": 7, "size": 40,
    }  # fmt: skip
    return OmegaConf.merge(config, {**base, **changes})


def test_splits_have_their_own_sizes_and_tasks(tokenizer):
    train, val = (open_data(section(), tokenizer, split=split) for split in ("train", "val"))
    assert (len(train), train.batch_size) == (40, 5)
    assert (len(val), val.batch_size) == (7, 7)
    assert val.batch(0).non_tensor_batch["index"].tolist() == list(range(7))
    mine = set(map(tuple, train.batch(1).non_tensor_batch["prompt_ids"]))
    assert mine != set(map(tuple, val.batch(0).non_tensor_batch["prompt_ids"]))


def test_the_chat_style_asks_through_the_template(tokenizer):
    chat = open_data(
        section(prompt_style="verbatim", apply_chat_template=True, max_prompt_length=120), tokenizer
    )
    arrays = chat.batch(1).non_tensor_batch
    assert arrays["raw_prompt"][0][0]["role"] == "user"
    assert tokenizer.decode(arrays["prompt_ids"][0], skip_special=False).endswith("<|assistant|>")


def test_warm_up_rows_are_prompt_answer_and_end_token(tokenizer):
    batch = warmup_batch(section(), tokenizer, steps=3, batch_size=4)
    tensors = {name: value.numpy() for name, value in batch.batch.items()}
    assert tensors["input_ids"].shape == (12, 10)
    assert np.array_equal(
        tensors["input_ids"], np.concatenate([tensors["prompts"], tensors["responses"]], axis=1)
    )
    assert np.array_equal(tensors["attention_mask"][:, 6:], tensors["response_mask"])
    for row in range(12):
        mask, length = tensors["attention_mask"][row], tensors["response_mask"][row].sum()
        assert np.array_equal(mask, np.sort(mask[:6]).tolist() + [1] * length + [0] * (4 - length))
        assert tensors["position_ids"][row][mask == 1].tolist() == list(range(mask.sum()))
        assert tensors["responses"][row][length - 1] == tokenizer.eos_id
        assert (tensors["responses"][row][length:] == tokenizer.pad_id).all()
        text = tokenizer.decode(tensors["input_ids"][row].tolist())
        task, answer = text.split("=")
        left, sign, right = task
        assert int(answer) == (int(left) + int(right) if sign == "+" else int(left) - int(right))


def test_warm_up_steps_differ_and_repeat(tokenizer):
    one, two = (warmup_batch(section(), tokenizer, steps=2, batch_size=4) for _ in range(2))
    assert one.batch["input_ids"].equal(two.batch["input_ids"])
    assert not one.batch["input_ids"][:4].equal(one.batch["input_ids"][4:])


def test_an_answer_that_does_not_fit_is_refused(tokenizer):
    with pytest.raises(UsageError, match=r"DPA853.*max_response_length=1"):
        warmup_batch(section(max_response_length=1), tokenizer, steps=1, batch_size=4)
