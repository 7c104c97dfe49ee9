"""Metrics out of what trackers leave behind, and the history checks they feed."""

import gzip
import json

import pytest

from dataproto_audit.checker.files import check_file
from dataproto_audit.codes import UsageError
from dataproto_audit.dump.readers.metric_logs import is_metric_log, read_history
from dataproto_audit.testing.log_files import console_text, event_file, wandb_file

STEPS = [
    {"step": i, "actor/grad_norm": 0.5, "actor/pg_loss": -0.01 * i, "response_mask/tokens": 7.0}
    for i in range(1, 6)
]
BROKEN = [*STEPS[:3], {**STEPS[3], "response_mask/tokens": 0.0}]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def logs(steps):
    verl = [{"step": s["step"], "data": {k: v for k, v in s.items() if k != "step"}} for s in steps]
    return {
        "verl.jsonl": lines(verl),
        "flat.jsonl": lines(steps),
        "list.json": json.dumps(steps).encode(),
        "verl.jsonl.gz": gzip.compress(lines(verl)),
        "wandb_history.jsonl": lines(
            {"_step": s["step"], "_runtime": 3.5, "histogram": {"bins": [1]}, **s} for s in steps
        ),
        "console.log": console_text(steps).encode(),
        "ray.log": console_text(steps, prefix="\x1b[36m(TaskRunner pid=12)\x1b[0m ").encode(),
        "events.out.tfevents.1.host": event_file(steps),
        "run-1.wandb": wandb_file(steps),
    }


@pytest.mark.parametrize("name", list(logs(STEPS)))
def test_every_format_gives_the_same_steps(name, tmp_path):
    data = logs(STEPS)[name]
    (tmp_path / "any_name").write_bytes(data)
    found = read_history(tmp_path / "any_name")
    assert [step["step"] for step in found] == [1, 2, 3, 4, 5]
    for got, want in zip(found, STEPS, strict=True):
        for key, value in want.items():
            assert got[key] == pytest.approx(value, rel=1e-6)


TOLD = [name for name in logs(STEPS) if name not in ("list.json", "verl.jsonl.gz")]


@pytest.mark.parametrize("name", TOLD)
def test_a_metric_log_is_told_by_its_content_and_checked(name, tmp_path):
    path = tmp_path / "x"
    path.write_bytes(logs(BROKEN)[name])
    assert is_metric_log(path.read_bytes())
    [checked] = check_file(path)
    assert checked.evidence_level == "history"
    assert [(f.code, f.step) for f in checked.report] == [("DPA608", 4)]
    path.write_bytes(logs(STEPS)[name])
    [healthy] = check_file(path)
    assert healthy.report.ok
    assert not healthy.report.findings


def test_numbers_as_numpy_prints_them(tmp_path):
    (tmp_path / "log").write_text(
        "step:3 - actor/pg_loss:np.float64(-0.25) - perf/x:np.int64(4) - a:b:1e-3 - note:text\n"
        "noise step:x - y:1\n[step:4 - z:nan - up:True]\n(w pid=1) step:5 - z:inf\n"
    )
    found = read_history(tmp_path / "log")
    assert found[0] == {"step": 3, "actor/pg_loss": -0.25, "perf/x": 4.0, "a:b": 0.001}
    assert found[-1] == {"step": 5, "z": float("inf")}


def test_event_files_of_a_folder_are_one_run(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "events.1").write_bytes(event_file(STEPS[:3]))
    (tmp_path / "events.2").write_bytes(event_file(STEPS[2:]))
    (tmp_path / "notes.txt").write_text("nothing")
    assert [step["step"] for step in read_history(tmp_path)] == [1, 2, 3, 4, 5]


def test_records_longer_than_a_block_and_cut_off_ends(tmp_path):
    many = [{"step": 1, **{f"m{i}": float(i) for i in range(4000)}}, {"step": 2, "m0": 1.0}]
    data = wandb_file(many)
    assert len(data) > 2 * 32768
    (tmp_path / "run.wandb").write_bytes(data)
    assert len(read_history(tmp_path / "run.wandb")[0]) == 4001
    (tmp_path / "cut.wandb").write_bytes(data[:-5])
    assert [step["step"] for step in read_history(tmp_path / "cut.wandb")] == [1]
    (tmp_path / "cut.events").write_bytes(event_file(STEPS)[:-5])
    assert len(read_history(tmp_path / "cut.events")) == 5


def damaged(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("data", "fragment"),
    [
        (damaged(event_file(STEPS), 200), "wrong checksum"),
        (damaged(wandb_file(STEPS), 60), "wrong checksum"),
        (b":W&B\xe1\xbe\x01" + bytes(20), "another version"),
        (b"a line\nanother", "no line of it reads step:N"),
        (b'{"step": 1}\n3', "not an object"),
        (b'{"step": 1}\n{\n', "line 2, column"),
        (b"[1, 2]", "not an object"),
        (b"\x80\x04N.", "no history"),
        (b"", "empty"),
    ],
)
def test_what_is_no_history_is_explained(data, fragment, tmp_path):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(UsageError, match="DPA857") as error:
        read_history(tmp_path / "x")
    assert fragment in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.remedy


def test_a_folder_without_event_files(tmp_path):
    with pytest.raises(UsageError, match="no event file"):
        read_history(tmp_path)


def test_batches_are_no_metric_logs(samples):
    for path in samples.rglob("*"):
        if path.is_file() and path.suffix in (".pkl", ".pt", ".parquet", ".jsonl"):
            held = path.name == "metrics.jsonl"
            assert is_metric_log(path.read_bytes()[: 1 << 16]) is held, path


def test_a_line_that_a_killed_run_did_not_finish_is_left_out(tmp_path):
    whole = '{"step": 1, "data": {"actor/loss": 1.0}}\n{"step": 2, "data": {"actor/loss": 2.0}}\n'
    log = tmp_path / "log.jsonl"
    log.write_text(whole + '{"step": 3, "data": {"actor/lo')
    assert [step["step"] for step in read_history(log)] == [1, 2]
    log.write_text(whole.replace("{", "", 1))  # not the last one
    with pytest.raises(UsageError, match="DPA857"):
        read_history(log)
