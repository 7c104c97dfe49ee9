from dataclasses import dataclass, field

import numpy as np
import pytest

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.prompts import LengthRule, PromptData, object_array
from dataproto_audit.trainer.sources import GeneratorSource, Row
from dataproto_audit.trainer.tokenizer import load_tokenizer, write_char_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_char_tokenizer(folder, "ascii", max_length=64)
    return load_tokenizer(folder)


@dataclass
class Texts:
    texts: list = field(default_factory=list)
    name: str = "texts"

    def __len__(self):
        return len(self.texts)

    def row(self, index):
        return Row(self.texts[index], "src", {"ground_truth": str(index)}, {"index": index})


TEN = Texts([f"prompt {i}" for i in range(10)])


def data(tokenizer, source=TEN, *, limit=20, batch_size=4, **more):
    rule = LengthRule(limit, more.pop("filter", False), more.pop("truncation", "error"))
    return PromptData(source, tokenizer, rule, batch_size=batch_size, **more)


def indices(batch):
    return batch.non_tensor_batch["index"].tolist()


def test_fields_of_a_batch(tokenizer):
    batch = data(tokenizer, shuffle=False).batch(1)
    assert len(batch) == 4
    assert batch.batch is None
    arrays = batch.non_tensor_batch
    assert set(arrays) == {
        "raw_prompt", "prompt_ids", "data_source", "reward_model", "extra_info", "index",
    }  # fmt: skip
    assert all(array.dtype == object and array.shape == (4,) for array in arrays.values())
    assert arrays["prompt_ids"][2] == tokenizer.encode("prompt 2")
    assert arrays["raw_prompt"][2] == "prompt 2"
    assert indices(batch) == [0, 1, 2, 3]


def test_every_epoch_holds_each_row_once(tokenizer):
    prompts = data(tokenizer, seed=5)
    drawn = [i for step in range(1, 6) for i in indices(prompts.batch(step))]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10] != drawn[10:]


def test_a_batch_depends_on_its_step_alone(tokenizer):
    first, resumed = data(tokenizer, seed=5), data(tokenizer, seed=5)
    walked = [indices(first.batch(step)) for step in range(1, 9)]
    assert [indices(resumed.batch(step)) for step in (8, 3, 1)] == [
        walked[7], walked[2], walked[0],
    ]  # fmt: skip
    assert indices(resumed.batch(0)) == walked[0]
    assert walked != [indices(data(tokenizer, seed=6).batch(s)) for s in range(1, 9)]


def test_one_pass_holds_each_row_once_in_order(tokenizer):
    batches = list(data(tokenizer, batch_size=4).one_pass())
    assert [indices(batch) for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


LONG = Texts(["a" * 30 if i % 5 == 2 else f"p{i}" for i in range(10)])


def test_long_prompts_are_refused_with_their_row_and_lengths(tokenizer):
    with pytest.raises(UsageError, match=r"DPA853.*texts, row 2.*31 tokens.*=20"):
        data(tokenizer, LONG)


def test_long_prompts_are_left_out_and_counted(tokenizer):
    prompts = data(tokenizer, LONG, filter=True)
    assert (len(prompts), prompts.overlong) == (8, 2)
    drawn = [i for step in (1, 2) for i in indices(prompts.batch(step))]
    assert sorted(drawn) == [0, 1, 3, 4, 5, 6, 8, 9]
    assert [i for b in prompts.one_pass() for i in indices(b)] == sorted(drawn)


@pytest.mark.parametrize(("side", "kept"), [("left", slice(-20, None)), ("right", slice(20))])
def test_long_prompts_are_cut_where_asked(tokenizer, side, kept):
    source = Texts(["".join(chr(65 + k) for k in range(26))] * 4)
    prompts = data(tokenizer, source, truncation=side)
    ids = prompts.batch(1).non_tensor_batch["prompt_ids"][0]
    assert ids == tokenizer.encode(source.texts[0])[kept]


def test_nothing_but_long_prompts_is_an_error(tokenizer):
    with pytest.raises(UsageError, match=r"DPA853.*every prompt"):
        data(tokenizer, Texts(["a" * 30] * 9), filter=True)


def test_too_few_rows_are_an_error(tokenizer):
    with pytest.raises(UsageError, match=r"DPA857.*10 usable rows.*batch of 11"):
        data(tokenizer, batch_size=11)


def test_an_unknown_character_is_an_error_of_the_tiny_tokenizer(tokenizer):
    with pytest.raises(UsageError, match=r"DPA857.*row 1.*é"):
        data(tokenizer, Texts(["ok", "caf\u00e9", "ok", "ok"]))


def test_an_empty_prompt_is_an_error(tokenizer):
    class NoBos:
        charset = None

        def encode_batch(self, texts):
            return [[7] * len(text) for text in texts]

    with pytest.raises(UsageError, match=r"DPA857.*row 1.*no tokens"):
        data(NoBos(), Texts(["ok", ""]), batch_size=2)


def generated(size=200):
    # One to three digits: "1+2=" has 5 tokens with BOS, "100+2=" 7.
    arguments = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 3}
    return GeneratorSource(
        "chain_sum", arguments, size=size, seed=1, style="expression", chat=False
    )


def test_long_prompts_of_a_generator_are_replaced_by_draws_of_the_same_step(tokenizer):
    first, resumed = (data(tokenizer, generated(), limit=6, filter=True) for _ in range(2))
    batches = [first.batch(step) for step in (1, 2, 3)]
    assert all(len(ids) <= 6 for b in batches for ids in b.non_tensor_batch["prompt_ids"])
    assert first.overlong > 0
    assert indices(resumed.batch(3)) == indices(batches[2])


def test_a_generator_is_looked_at_before_the_run(tokenizer):
    with pytest.raises(UsageError, match=r"DPA853.*chain_sum"):
        data(tokenizer, generated(), limit=6)


def test_a_checkpoint_of_other_data_is_refused(tokenizer):
    prompts = data(tokenizer)
    prompts.check_identity(data(tokenizer).identity())
    for change in ({"seed": 9}, {"batch_size": 5}, {"shuffle": False}):
        with pytest.raises(UsageError, match=f"DPA804.*{next(iter(change))}"):
            prompts.check_identity(data(tokenizer, **change).identity())
    other = Texts([f"other {i}" for i in range(10)])
    with pytest.raises(UsageError, match=r"DPA804.*first_row"):
        prompts.check_identity(data(tokenizer, other).identity())


def test_chat_prompts_go_through_the_template(tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    batch = data(tokenizer, Texts([messages, "plain"]), batch_size=2, shuffle=False).batch(1)
    assert batch.non_tensor_batch["prompt_ids"].tolist() == [
        tokenizer.encode_chat(messages),
        tokenizer.encode("plain"),
    ]


def test_object_arrays_keep_lists_of_equal_length_apart():
    array = object_array([[1, 2], [3, 4]])
    assert array.shape == (2,)
    assert array[1] == [3, 4]
    assert object_array([]).shape == (0,)
    assert isinstance(array, np.ndarray)
