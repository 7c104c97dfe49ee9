import json
import sys
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.sources import FileSource, GeneratorSource, open_source

SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def row(text="2+2=", truth="4", **more):
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": text}]
    model = {"style": "rule", "ground_truth": truth}
    return {"prompt": messages, "data_source": "sums", "reward_model": model, **more}


def write(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def settings(**changes):
    base = {
        "generator": None, "generator_args": {}, "size": 50, "prompt_style": "verbatim",
        "train_files": None, "val_files": None, "prompt_key": "prompt", "seed": 3,
        "apply_chat_template": False, "train_batch_size": 4, "val_batch_size": 8,
    }  # fmt: skip
    return SimpleNamespace(**{**base, **changes})


def generator(style="expression", *, name="chain_sum", arguments=SUM, seed=0, chat=False):
    return GeneratorSource(name, arguments, size=20, seed=seed, style=style, chat=chat)


def test_an_expression_is_the_bare_task():
    source = generator()
    assert len(source) == 20
    for index in range(20):
        one = source.row(index)
        assert one.raw_prompt.endswith("=")
        assert len(one.raw_prompt) == 4
        left, sign, right = one.raw_prompt[:3]
        expected = int(left) + int(right) if sign == "+" else int(left) - int(right)
        assert one.reward_model == {"style": "rule", "ground_truth": str(expected)}
        assert one.extra_info == {"index": index}
        assert one.data_source == "chain_sum"


def test_verbatim_and_chat_keep_the_question_and_its_metadata():
    text, chat = generator("verbatim").row(2), generator("chat", chat=True).row(2)
    assert text.raw_prompt.startswith("State the final answer")
    assert chat.raw_prompt == [{"role": "user", "content": text.raw_prompt}]
    assert text.extra_info["metadata"]["num_terms"] == 2


def test_rows_are_the_same_whenever_asked_for():
    assert [generator().row(i) for i in (7, 3, 7)] == [generator().row(i) for i in (7, 3, 7)]
    assert generator(seed=1).row(0) != generator(seed=9).row(0)


def test_any_generator_works_by_name():
    source = generator("verbatim", name="leg_counting", arguments={})
    assert source.row(0).reward_model["ground_truth"].isdigit()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"name": "chain_sun"}, "chain_sum"),
        ({"arguments": {"no_such": 1}}, "no_such"),
        ({"arguments": {"min_terms": 5, "max_terms": 2}}, "chain_sum"),
    ],
)
def test_unknown_generators_and_arguments_are_refused(change, named):
    with pytest.raises(UsageError, match="DPA851") as error:
        generator(**change)
    assert named in str(error.value)


def test_a_task_without_an_expression_cannot_be_cut():
    source = generator("expression", name="leg_counting", arguments={})
    with pytest.raises(UsageError, match=r"DPA851.*leg_counting"):
        source.row(0)


def test_a_missing_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UsageError, match=r"DPA858.*dataproto-audit\[trainer\]"):
        generator()


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_files_in_verl_s_schema_are_read(tmp_path, suffix):
    path = write(tmp_path / f"data{suffix}", [row(extra_info={"split": "x"}), row("3+3=", "6")])
    source = FileSource([path], prompt_key="prompt", chat=True)
    assert len(source) == 2
    assert source.row(1).raw_prompt == row("3+3=")["prompt"]
    assert source.row(1).reward_model["ground_truth"] == "6"
    assert source.row(0).extra_info["split"] == "x"
    assert source.row(1).extra_info["index"] == 1


def test_without_a_template_messages_become_their_text(tmp_path):
    path = write(tmp_path / "d.jsonl", [row(), row() | {"prompt": "plain"}])
    texts = FileSource([path], prompt_key="prompt", chat=False)
    assert texts.row(0).raw_prompt == "Add.\n2+2="
    assert texts.row(1).raw_prompt == "plain"
    chat = FileSource([path], prompt_key="prompt", chat=True)
    assert chat.row(1).raw_prompt == [{"role": "user", "content": "plain"}]


def test_several_files_follow_each_other(tmp_path):
    files = [
        write(tmp_path / "a.parquet", [row("1+1=")]),
        write(tmp_path / "b.jsonl", [row("2+1=")]),
    ]
    source = FileSource(files, prompt_key="prompt", chat=False)
    assert [source.row(i).raw_prompt[-4:] for i in range(2)] == ["1+1=", "2+1="]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize("gone", ["prompt", "data_source", "reward_model"])
def test_a_missing_column_is_named(tmp_path, suffix, gone):
    one = row()
    del one[gone]
    path = write(tmp_path / f"d{suffix}", [one])
    with pytest.raises(UsageError, match=f"DPA857.*no column {gone}") as error:
        FileSource([path], prompt_key="prompt", chat=False)
    assert path in error.value.message


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("none.parquet", None, "no such file"),
        ("bad.parquet", "not parquet", "parquet"),
        ("empty.jsonl", "\n", "no rows"),
        ("bad.jsonl", json.dumps(row()) + "\n{", "line 2"),
        ("list.jsonl", "[1]\n", "line 1"),
    ],
)
def test_unreadable_files_are_named(tmp_path, name, text, named):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match="DPA857") as error:
        FileSource([str(path)], prompt_key="prompt", chat=False)
    assert named in error.value.message
    assert name in error.value.message


def test_a_binary_file_is_no_jsonl(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"DPA857.*not readable"):
        FileSource([str(path)], prompt_key="prompt", chat=False)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prompt": [{"role": "user"}]}, "chat messages"),
        ({"prompt": ""}, "chat messages"),
        ({"prompt": 5}, "chat messages"),
        ({"reward_model": {"style": "rule"}}, "ground_truth"),
        ({"reward_model": "4"}, "ground_truth"),
    ],
)
def test_an_unusable_row_is_named(tmp_path, change, named):
    path = write(tmp_path / "d.jsonl", [row(), row() | change])
    with pytest.raises(UsageError, match=r"DPA857.*row 1") as error:
        FileSource([path], prompt_key="prompt", chat=False)
    assert named in error.value.message


def test_splits_draw_different_tasks_from_a_generator():
    config = settings(generator="chain_sum", generator_args=SUM, prompt_style="expression")
    train, val, warmup = (open_source(config, split=s) for s in ("train", "val", "warmup"))
    assert (len(train), len(val), len(warmup)) == (50, 8, 50)
    drawn = [tuple(s.row(i).raw_prompt for i in range(8)) for s in (train, val, warmup)]
    assert len(set(drawn)) == 3


def test_files_win_over_a_generator(tmp_path):
    path = write(tmp_path / "d.jsonl", [row()])
    config = settings(generator="chain_sum", train_files=path)
    assert isinstance(open_source(config, split="train"), FileSource)
    assert isinstance(open_source(config, split="val"), GeneratorSource)


def test_a_split_without_a_source_is_an_error():
    with pytest.raises(UsageError, match=r"DPA851.*val_files"):
        open_source(settings(), split="val")
