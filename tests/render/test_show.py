"""What a saved batch holds, for a terminal and for JSON."""

import json
from io import StringIO

import numpy as np
import pytest
import torch
from rich.console import Console

from dataproto_audit.codes import UsageError
from dataproto_audit.dump.readers import read_batches
from dataproto_audit.protocol import DataProto
from dataproto_audit.render.show import MAX_TOKENS, short, show, show_dict


def printed(saved, rows=()):
    console = Console(file=StringIO(), width=220, color_system=None)
    console.print(show(saved, rows=rows))
    return console.file.getvalue()


def saved_batch(tmp_path, **tensors):
    objects = np.empty(2, dtype=object)
    objects[:] = ["\x1b[31mred [bold]x", {"image": torch.zeros(2, 3)}]
    made = {
        "prompts": torch.tensor([[0, 5], [6, 7]]),
        "responses": torch.tensor([[8, 9, 0], [8, 0, 0]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 0, 0]]),
        "response_mask": torch.tensor([[1, 1, 0], [1, 0, 0]]),
        "old_log_probs": torch.tensor([[-1.0, float("nan"), -3.0], [-0.5, -7.0, -7.0]]),
        **tensors,
    }
    batch = DataProto.from_dict(made, {"o": objects, "n": np.array([1.5, 2.5])}, {"t": 1.0})
    batch.save_to_disk(tmp_path / "_update_actor.in.pkl")
    (saved,) = read_batches(tmp_path / "_update_actor.in.pkl")
    return saved


def test_fields_with_ranges_and_coverage(tmp_path):
    about = show_dict(saved_batch(tmp_path))
    fields = {field["name"]: field for field in about["fields"]}
    assert fields["response_mask"]["coverage"] == 0.5
    assert fields["old_log_probs"] == {
        "name": "old_log_probs", "dtype": "float32", "shape": "[2, 3]", "min": -7.0,
        "mean": -3.7, "max": -0.5, "not_finite": 1, "coverage": None,
    }  # fmt: skip
    assert (about["rows"], about["prompt"], about["response"]) == (2, 2, 3)
    assert (about["stage"], about["when"], about["step"]) == ("update_actor", "before", 1)
    assert about["objects"][1]["example"] == "1.5"


def test_rows_token_by_token(tmp_path):
    (row,) = show_dict(saved_batch(tmp_path), rows=[-2])["tokens"]
    assert row["row"] == 0
    assert row["prompt"] == [5]
    assert row["columns"]["responses"] == [8, 9]
    assert row["columns"]["old_log_probs"] == [-1.0, None]
    assert row["columns"]["attention"] == [1, 1]
    with pytest.raises(UsageError, match="row 2 is outside a batch of 2 rows"):
        show_dict(saved_batch(tmp_path), rows=[2])


def test_what_sits_on_padding_is_shown(tmp_path):
    rewards = torch.zeros(2, 3)
    rewards[1, 2] = 1.0
    saved = saved_batch(tmp_path, token_level_rewards=rewards)
    assert show_dict(saved, rows=[1])["tokens"][0]["columns"]["token_level_rewards"] == [0, 0, 1.0]


def test_the_document_is_json(tmp_path):
    saved = saved_batch(tmp_path)
    json.dumps(show_dict(saved, rows=[0, 1]), allow_nan=False)


def test_text_of_a_file_cannot_steer_the_terminal(tmp_path):
    text = printed(saved_batch(tmp_path), rows=[0, 1])
    assert "\x1b" not in text
    assert "[bold]x" in text
    assert "tensor(float32, [2, 3])" in text
    assert "50.0%" in text
    assert "row 0, response" in text


def test_long_rows_are_cut(tmp_path):
    width = MAX_TOKENS + 10
    ones = torch.ones(2, width, dtype=torch.int64)
    saved = saved_batch(
        tmp_path, responses=ones, response_mask=ones, old_log_probs=-ones.float(),
        attention_mask=torch.ones(2, width + 2, dtype=torch.int64),
    )  # fmt: skip
    assert show_dict(saved, rows=[0])["tokens"][0]["left_out"] == 10
    assert "and 10 more tokens" in printed(saved, rows=[0])


def test_short_is_short():
    deep = "x"
    for _ in range(50):
        deep = [deep] * 3
    assert len(short(deep)) <= 200
    assert short("a\nb") == "'a\\nb'"
    assert short(np.zeros((3, 4))) == "array(float64, [3, 4])"


@pytest.mark.parametrize(
    ("path", "fragments"),
    [
        ("verl-0.9.1/v1_tool/v1.tq_all_before._update_actor.td.pt", ["jagged", "store_key"]),
        ("trl/healthy/completions/completions_00002.parquet", ["no tensors", "note: text without"]),
        ("openrlhf/healthy/experiences.pt", ["openrlhf, after advantage", "first token"]),
        ("verl-0.7.1/gae_legacy/_update_actor.out.pkl", ["metrics"]),
        ("verl-0.9.1/files_torch/empty_batch.pkl", ["no tensors"]),
    ],
)
def test_samples_are_shown(path, fragments, request):
    samples = request.path.parents[1] / "data" / "samples"
    for saved in read_batches(samples / path):
        rows = [0] if saved.rows else []
        text = printed(saved, rows=rows)
        json.dumps(show_dict(saved, rows=rows), allow_nan=False)
        assert all(fragment in text for fragment in fragments), text


def test_rows_fit_eighty_columns(request):
    samples = request.path.parents[1] / "data" / "samples"
    names = ("verl-0.7.1/grpo_n4_engine_dyn/compute_advantage.out.pkl",
             "verl-0.7.1/gae_legacy/compute_advantage.out.pkl")  # fmt: skip
    for name in names:
        [saved] = read_batches(samples / name)
        console = Console(file=StringIO(), width=80, color_system=None)
        console.print(show(saved, rows=[1]))
        text = console.file.getvalue()
        assert "…" not in text.partition("row 1, response")[2]
        assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
        assert "token_level_rewards" in text
        head = next(line for line in text.splitlines() if line.split()[:3] == ["t", "id", "mask"])
        assert {"rollout", "old", "score", "adv"} <= set(head.split())


def test_equal_fields_are_named_once(tmp_path):
    same = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.0, 0.0]])
    saved = saved_batch(tmp_path, advantages=same, returns=same.clone())
    text = printed(saved, rows=[0])
    assert "returns: as advantages" in text
    assert "0.500" in text


def test_tokens_as_text(tmp_path):
    def decode(token):
        if token == 9:
            raise IndexError(token)
        return f"«{token}»"

    saved = saved_batch(tmp_path)
    [row] = show_dict(saved, rows=[0], decode=decode)["tokens"]
    assert row["columns"]["text"] == ["«8»", "<9>", "«0»"][: len(row["columns"]["text"])]
    assert row["prompt_text"] == "«5»"
    console = Console(file=StringIO(), width=120, color_system=None)
    console.print(show(saved, rows=[0], decode=decode))
    assert "token" in console.file.getvalue()
    assert "«8»" in console.file.getvalue()


CHAT = [
    {"role": "system", "content": "be terse"},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "how\nmany?"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]},
]
SAID = "system: be terse | user: <image> how\\nmany? | assistant:  <tool_calls>"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (CHAT, SAID),
        (np.array(CHAT, dtype=object), SAID),
        ({"messages": CHAT}, SAID),
        (np.float64(1.5), "1.5"),
        (np.str_("x"), "'x'"),
        (np.bool_(True), "True"),
        (torch.tensor(2), "2"),
        (np.datetime64("2020-01-01"), "'2020-01-01'"),
        ({"acc": np.float32(0.5), "k": (np.int64(3),)}, "{'acc': 0.5, 'k': (3,)}"),
        (torch.float32, "float32"),
        ([{"role": "user"}], "[{'role': 'user'}]"),
        ([], "[]"),
    ],
)
def test_values_are_told_without_names_of_libraries(value, said):
    assert short(value) == said


def test_a_long_chat_is_cut():
    assert short([{"role": "user", "content": "x" * 500}] * 40).startswith("user: xxx")
    assert len(short([{"role": "user", "content": "x" * 500}] * 40)) == 200
