import pickle

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from dataproto_audit.codes import RunError, UsageError
from dataproto_audit.protocol import DataProto
from dataproto_audit.trainer.prompts import object_array
from dataproto_audit.trainer.rewards import BUILT_IN, Scorer, open_scorer
from dataproto_audit.trainer.schema import RewardConfig
from dataproto_audit.trainer.tokenizer import load_tokenizer, write_char_tokenizer

TRUTHS = ["12", "7", "7", "8"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_char_tokenizer(folder, "ascii", max_length=64)
    return load_tokenizer(folder)


def answers(tokenizer, rows=(("12", True), ("7", False), (" 7", True), ("", True)), **arrays):
    """Four responses of at most four tokens after a prompt of two; True ends with EOS."""
    width = 4
    responses = np.full((len(rows), width), tokenizer.pad_id)
    mask = np.zeros((len(rows), 2 + width), np.int64)
    mask[:, :2] = 1
    for row, (text, ended) in enumerate(rows):
        ids = tokenizer.encode(text, special=False) + [tokenizer.eos_id] * ended
        responses[row, : len(ids)] = ids
        mask[row, 2 : 2 + len(ids)] = 1
    columns = {
        "reward_model": [{"style": "rule", "ground_truth": truth} for truth in TRUTHS[: len(rows)]],
        "data_source": ["chain_sum"] * len(rows),
        "extra_info": [{"index": i} for i in range(len(rows))],
        "uid": list("abcd")[: len(rows)],
        "finish_reason": ["stop" if ended else "length" for _, ended in rows],
    } | arrays
    return DataProto.from_dict(
        tensors={
            "responses": torch.from_numpy(responses),
            "attention_mask": torch.from_numpy(mask),
        },
        non_tensors={name: object_array(values) for name, values in columns.items()},
    )


def scorer(tokenizer, function, **more):
    return Scorer(function, tokenizer, "user.py:compute_score", **more)


def test_the_score_sits_on_the_last_attended_token(tokenizer):
    out = scorer(tokenizer, lambda extra_info, **_: 1.5 + extra_info["index"]).score(
        answers(tokenizer)
    )
    expected = torch.zeros(4, 4)
    for row, column in enumerate((2, 0, 2, 0)):
        expected[row, column] = 1.5 + row
    for name in ("rm_scores", "token_level_scores"):
        assert out.batch[name].dtype == torch.float32
        assert out.batch[name].equal(expected)
    assert out.batch["rm_scores"].data_ptr() != out.batch["token_level_scores"].data_ptr()
    assert out.non_tensor_batch["score"].tolist() == [1.5, 2.5, 3.5, 4.5]


def test_calling_adds_to_the_batch(tokenizer):
    batch = answers(tokenizer)
    out = scorer(tokenizer, lambda **_: 0.5)(batch)
    assert {"responses", "rm_scores"} <= set(out.batch.keys())
    assert out.non_tensor_batch["uid"].tolist() == list("abcd")


def test_functions_see_verl_s_arguments(tokenizer):
    seen = []
    scorer(tokenizer, lambda **given: seen.append(given) or 0).score(answers(tokenizer))
    assert seen[1] == {
        "data_source": "chain_sum",
        "solution_str": "7",
        "ground_truth": "7",
        "extra_info": {"index": 1, "finish_reason": "length"},
    }
    assert [given["solution_str"] for given in seen] == ["12", "7", " 7", ""]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("exact", [1, 1, 1, 0]), ("exact_with_eos", [1, 0, 0, 0]), ("compute_score", [1, 1, 1, 0])],
)
def test_built_in_scorers(tokenizer, name, expected):
    assert (
        scorer(tokenizer, BUILT_IN[name])
        .score(answers(tokenizer))
        .non_tensor_batch["score"]
        .tolist()
        == expected
    )


def test_a_batch_without_finish_reasons_is_judged_by_its_last_token(tokenizer):
    batch = answers(tokenizer)
    del batch.non_tensor_batch["finish_reason"]
    out = scorer(tokenizer, BUILT_IN["exact_with_eos"]).score(batch)
    assert out.non_tensor_batch["score"].tolist() == [1, 0, 0, 0]


def test_reasoning_gym_s_own_scorer(tokenizer):
    batch = answers(tokenizer, [("12", True), ("+7", True)])
    out = scorer(tokenizer, BUILT_IN["reasoning_gym"]).score(batch)
    assert out.non_tensor_batch["score"].tolist() == [1, 1]
    other = answers(tokenizer, data_source=["gsm8k"] * 4)
    with pytest.raises(UsageError, match=r"DPA851.*gsm8k"):
        scorer(tokenizer, BUILT_IN["reasoning_gym"]).score(other)


def test_dict_results_bring_columns(tokenizer):
    def compute_score(solution_str, **_):
        more = {"length": len(solution_str)} if solution_str else {}
        return {"score": 1, **more}

    out = scorer(tokenizer, compute_score).score(answers(tokenizer))
    assert out.non_tensor_batch["length"].tolist() == [2, 1, 2, None]
    assert out.non_tensor_batch["score"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("value", [True, 3, np.float32(0.5), np.array(2.0), torch.tensor(0.25)])
def test_any_real_number_will_do(tokenizer, value):
    out = scorer(tokenizer, lambda **_: value).score(answers(tokenizer))
    assert out.non_tensor_batch["score"].tolist() == [float(value)] * 4


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), None, "1.0", {}, {"score": None}, [1.0, 2.0], 1j, {"score": "x"}],
)
def test_anything_else_is_refused_with_its_row(tokenizer, value):
    function = scorer(tokenizer, lambda extra_info, **_: value if extra_info["index"] == 2 else 0.0)
    with pytest.raises(RunError, match=r"DPA861.*user\.py:compute_score.*row 2 \(uid c\).*' 7'"):
        function.score(answers(tokenizer))


def test_a_raising_function_is_reported_with_row_place_and_response(tokenizer):
    def compute_score(solution_str, **_):
        return 1 / len(solution_str)

    with pytest.raises(RunError, match="DPA860") as error:
        scorer(tokenizer, compute_score).score(answers(tokenizer))
    message = error.value.message
    for part in ("ZeroDivisionError", "row 3 (uid d)", "test_rewards.py", "response ''"):
        assert part in message
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert pickle.loads(pickle.dumps(error.value)).code == "DPA860"


def test_a_function_that_exits_does_not_end_the_run(tokenizer):
    def compute_score(**_):
        raise SystemExit(3)

    with pytest.raises(RunError, match=r"DPA860.*SystemExit.*row 0"):
        scorer(tokenizer, compute_score).score(answers(tokenizer))


def test_long_responses_are_shown_short(tokenizer):
    function = scorer(tokenizer, lambda **_: None)
    function._texts = lambda rows: ["x" * 5000] * 4
    with pytest.raises(RunError, match="DPA861") as error:
        function.score(answers(tokenizer))
    assert len(error.value.message) < 400


def reward(tmp_path, code, name="compute_score"):
    path = tmp_path / "my_reward.py"
    path.write_text(code)
    section = OmegaConf.structured(RewardConfig)
    section.custom_reward_function.path = str(path)
    section.custom_reward_function.name = name
    return section


def test_a_function_from_a_file(tokenizer, tmp_path):
    code = (
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': len(solution_str) / 2, 'kind': data_source}\n"
    )
    opened = open_scorer(reward(tmp_path, code), tokenizer)
    assert opened.name == "my_reward.py:compute_score"
    out = opened.score(answers(tokenizer))
    assert out.non_tensor_batch["score"].tolist() == [1, 0.5, 1, 0]
    assert out.non_tensor_batch["kind"].tolist() == ["chain_sum"] * 4


def test_a_file_may_hold_what_looks_its_own_module_up(tokenizer, tmp_path):
    code = (
        "from __future__ import annotations\nimport dataclasses\n"
        "@dataclasses.dataclass\nclass Score:\n    value: float\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return Score(2.0).value\n"
    )
    opened = open_scorer(reward(tmp_path, code), tokenizer)
    assert opened.score(answers(tokenizer)).non_tensor_batch["score"].tolist() == [2.0] * 4


BATCHED = (
    "def compute_scores(data_sources, solution_strs, ground_truths, extra_infos):\n    return {}\n"
)


def test_a_batch_function_gets_all_rows_at_once(tokenizer, tmp_path):
    body = "[len(s) + 0.5 for s in solution_strs]"
    opened = open_scorer(reward(tmp_path, BATCHED.format(body), "compute_scores"), tokenizer)
    assert opened.batched
    assert opened.score(answers(tokenizer)).non_tensor_batch["score"].tolist() == [
        2.5, 1.5, 2.5, 0.5,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "code", "named"),
    [
        ("[1.0] * 3", "DPA861", "3 entries for 4 rows"),
        ("5", "DPA861", "int for 4 rows"),
        ("{'score': 1, 'a': 2, 'b': 3, 'c': 4}", "DPA861", "4 rows"),
        ("[1.0, 1.0, float('nan'), 1.0]", "DPA861", "row 2 (uid c)"),
        ("missing", "DPA860", "NameError"),
    ],
)
def test_unusable_batch_results(tokenizer, tmp_path, body, code, named):
    opened = open_scorer(reward(tmp_path, BATCHED.format(body), "compute_scores"), tokenizer)
    with pytest.raises(RunError, match=code) as error:
        opened.score(answers(tokenizer))
    assert named in error.value.message


def test_an_array_is_a_list_of_scores(tokenizer, tmp_path):
    body = "__import__('numpy').arange(4) / 4"
    opened = open_scorer(reward(tmp_path, BATCHED.format(body), "compute_scores"), tokenizer)
    assert opened.score(answers(tokenizer)).non_tensor_batch["score"].tolist() == [
        0, 0.25, 0.5, 0.75,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "name", "named"),
    [
        ("def other(): ...", "compute_score", "there are: other"),
        ("x = 1", "x", "there are: none"),
        ("import no_such_module_at_all", "compute_score", "no_such_module_at_all"),
        ("def f(:", "compute_score", "SyntaxError"),
        ("import sys\nsys.exit(0)", "compute_score", "SystemExit"),
    ],
)
def test_unusable_files_are_refused(tokenizer, tmp_path, code, name, named):
    with pytest.raises(UsageError, match=r"DPA851.*my_reward\.py") as error:
        open_scorer(reward(tmp_path, code, name), tokenizer)
    assert named in error.value.message


def test_missing_files_and_names_are_refused(tokenizer, tmp_path):
    section = reward(tmp_path, "")
    section.custom_reward_function.path = str(tmp_path / "nowhere.py")
    with pytest.raises(UsageError, match=r"DPA851.*nowhere\.py"):
        open_scorer(section, tokenizer)
    section.custom_reward_function.path = None
    section.custom_reward_function.name = "exactly"
    with pytest.raises(UsageError, match=r"DPA851.*exact_with_eos"):
        open_scorer(section, tokenizer)
