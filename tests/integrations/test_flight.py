"""verl raises: the input is kept, the reason is told, the same error goes on."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dataproto_audit import attach, open_run
from dataproto_audit.dump.trace import Trace
from dataproto_audit.integrations.flight import brief, keep

from .conftest import make


def raising(error: Exception) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


def fitted(trainer: Any, **settings: Any) -> BaseException:
    with pytest.raises(Exception) as caught, attach(trainer, run_dir="run", **settings):  # noqa: PT011 - any
        trainer.fit()
    return caught.value


def test_a_union_of_unequal_sides(verl: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    """The left side was not repeated: 4 prompts, 16 responses, n = 4."""
    trainer = make(verl)
    repeat, calls = trainer.repeated, []

    def once(batch: Any) -> Any:
        calls.append(1)
        return repeat(batch) if len(calls) == 1 else batch

    trainer.repeated = once
    error = fitted(trainer)
    assert isinstance(error, AssertionError)
    assert "in union of step 1" in caplog.text
    assert "16 rows vs 4, 16 = 4 x n (n=4): left side was not repeated" in caplog.text
    kept = {b.part: b for b in Trace("run").step(1).boundaries if b.part}
    assert list(kept) == ["left", "right"]
    assert {(b.stage, b.when) for b in kept.values()} == {("union", "before")}
    assert (kept["left"].view().rows, kept["right"].view().rows) == (4, 16)
    run = open_run("run")
    assert run.finished
    assert run.summary["error"].startswith(type(error).__name__)
    assert run.last_step == 1


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("_balance_batch", "balance"),
        ("_compute_old_log_prob", "old_log_prob"),
        ("_compute_ref_log_prob", "ref_log_prob"),
        ("_update_actor", "update_actor"),
    ],
)
def test_the_input_of_the_stage_is_kept(
    verl: ModuleType, caplog: pytest.LogCaptureFixture, name: str, stage: str
) -> None:
    trainer, error = make(verl), RuntimeError("out of memory")
    setattr(trainer, name, raising(error))
    assert fitted(trainer) is error
    assert f"in {stage} of step 1: RuntimeError: out of memory" in caplog.text
    assert "nothing wrong was found in its input (input 16 rows" in caplog.text
    step = Trace("run").step(1)
    assert step.ended == "broken_off"
    assert step.boundaries[-1].stage == stage
    assert step.boundaries[-1].part == "input"
    assert step.boundaries[-1].view().rows == 16


def test_a_broken_field_is_named(verl: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(verl)

    def broken(batch: Any) -> Any:
        batch.batch["attention_mask"] = batch.batch["attention_mask"] * 2
        raise ValueError("index out of range")

    trainer._compute_old_log_prob = broken
    fitted(trainer)
    assert "attention_mask" in caplog.text.split("Diagnosis:")[1]


def test_between_the_stages_the_last_batch_counts(
    verl: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(verl)
    trainer._save_checkpoint = raising(OSError("disk full"))
    assert isinstance(fitted(trainer), OSError)
    assert "verl raised in update_actor of step 1: OSError: disk full" in caplog.text
    kept = Trace("run").step(1).boundaries[-1]
    assert (kept.stage, kept.part) == ("update_actor", "input")
    assert "advantages" in kept.view()


def test_an_error_is_kept_once(verl: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(verl)
    trainer._update_actor = raising(RuntimeError("x"))
    fitted(trainer)
    assert caplog.text.count("Diagnosis:") == 1


def test_it_can_be_switched_off(verl: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(verl)
    trainer._update_actor = raising(RuntimeError("x"))
    fitted(trainer, flight_recorder=False, trace="off")
    assert "Diagnosis" not in caplog.text
    assert not Path("run/trace").exists()
    assert open_run("run").finished


def test_an_interrupt_closes_the_tables(verl: ModuleType) -> None:
    trainer = make(verl)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    trainer._update_actor = interrupt
    with pytest.raises(KeyboardInterrupt), attach(trainer, run_dir="run"):
        trainer.fit()
    assert open_run("run").finished
    step = Trace("run").step(1)
    assert step.ended == "broken_off"
    assert not any(boundary.part for boundary in step.boundaries)


def test_without_a_trace_only_the_input_is_kept(verl: ModuleType) -> None:
    trainer = make(verl)
    trainer._update_actor = raising(RuntimeError("x"))
    fitted(trainer, trace="off")
    assert [b.name for b in Trace("run").step(1).boundaries] == ["00_update_actor_before_input"]


def test_our_own_failure_does_not_hide_the_error(
    verl: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from dataproto_audit.integrations import flight

    monkeypatch.setattr(flight, "diagnosis", raising(ZeroDivisionError("ours")))
    trainer, error = make(verl), RuntimeError("theirs")
    trainer._update_actor = raising(error)
    assert fitted(trainer) is error
    assert "DPA904" in caplog.text


def test_rows_that_do_not_divide(verl: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    rollout = "actor_rollout_ref__rollout__log_prob_micro_batch_size_per_gpu"
    trainer = make(verl, **{rollout: 5})
    trainer._compute_old_log_prob = raising(AssertionError("data size must be divisible"))
    fitted(trainer)
    assert "16 rows do not divide by 10 = 2 ranks x 5 rows of a micro-batch" in caplog.text


def test_errors_of_workers_are_told_in_a_line() -> None:
    long = ValueError("\x1b[36mray::Worker\x1b[39m\n  File x, line 1\nKeyError: 'uid'\n")
    assert brief(long) == "ValueError: KeyError: 'uid'"
    assert brief(KeyError()) == "KeyError"


def test_the_first_nan_is_kept(verl: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(verl, steps=3, trainer__val_before_train=False, trainer__test_freq=0)
    original = trainer._compute_old_log_prob

    def not_finite(batch: Any) -> Any:
        out, more = original(batch)
        if trainer.global_steps > 1:
            out.batch["old_log_probs"][0, 0] = float("nan")
        return out, more

    trainer._compute_old_log_prob = not_finite
    with attach(trainer, run_dir="run"):
        trainer.fit()
    trace = Trace("run")
    assert trace.steps == [2, 3]
    recorded = trace.step(2).find("old_log_prob")
    assert recorded is not None
    assert recorded.tensor("old_log_probs", rows=[0])[0, 0].isnan()
    assert caplog.text.count("first values that are not finite") == 1


@pytest.mark.parametrize("trace", ["every:10", "last:1", "failing", "all", "off"])
def test_what_is_said_to_be_kept_is_there(
    verl: ModuleType, caplog: pytest.LogCaptureFixture, trace: str
) -> None:
    trainer = make(verl)
    trainer._update_actor = raising(RuntimeError("x"))
    fitted(trainer, trace=trace)
    told = caplog.text.split("Its input is kept: ")[1].splitlines()[0].rstrip(".")
    assert (Path(told) / "boundary.json").is_file()
    assert Trace("run").step(1).ended == "broken_off"


@pytest.mark.parametrize("trace", ["every:10", "last:1"])
def test_the_step_of_the_first_nan_is_there(
    verl: ModuleType, caplog: pytest.LogCaptureFixture, trace: str
) -> None:
    """Whatever the retention says, and though a failing step was kept before."""
    trainer = make(verl, steps=4, trainer__val_before_train=False, trainer__test_freq=0)
    original = trainer._compute_old_log_prob

    def wrong(batch: Any) -> Any:
        out, more = original(batch)
        if trainer.global_steps == 1:
            out.batch["old_log_probs"][0, 0] = 5.0  # no log-probability
        if trainer.global_steps == 2:
            out.batch["old_log_probs"][0, 0] = float("nan")
        return out, more

    trainer._compute_old_log_prob = wrong
    with attach(trainer, run_dir="run", trace=trace):
        trainer.fit()
    told = caplog.text.split("the batch is kept: ")[1].splitlines()[0]
    assert told.endswith("step_000002")
    assert (Path(told) / "step.json").is_file()


def test_input_kept_twice_without_a_trace_goes_on(tmp_path: Path) -> None:
    made = {"batch": {"responses": torch.ones(2, 3)}, "non_tensor_batch": {}, "meta_info": {}}
    first = keep(tmp_path, 1, "reward", {"not_finite": made})
    second = keep(tmp_path, 1, "update_actor", {"input": made, "odd": object()})
    assert [path.name for path in first + second] == [
        "00_reward_before_not_finite", "01_update_actor_before_input",
    ]  # fmt: skip
    assert [b.view().rows for b in Trace(tmp_path).step(1).boundaries] == [2, 2]


class Mute(Exception):
    """An error that cannot be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_that_cannot_be_printed_goes_on(
    verl: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, error = make(verl), Mute()
    trainer._compute_old_log_prob = raising(error)
    assert fitted(trainer) is error
    assert "verl raised in old_log_prob of step 1: Mute\n" in caplog.text
    run = open_run("run")
    assert run.finished
    assert run.summary["error"] == "Mute"
    assert not Path("run/.lock").exists()
    assert brief(error) == "Mute"


def test_an_unprintable_error_of_ours_does_not_reach_the_trainer(
    verl: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataproto_audit.auditor import Auditor

    monkeypatch.setattr(Auditor, "boundary", raising(Mute()))
    trainer = make(verl)
    with attach(trainer, run_dir="run"):
        trainer.fit()
    assert len(trainer.trained) == 1
    assert "Mute" in open_run("run").summary["switched_off"].values()


def test_whatever_fails_while_an_error_is_looked_at_the_error_goes_on(
    verl: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from dataproto_audit.integrations.verl_run import VerlRun

    trainer, error = make(verl), RuntimeError("theirs")
    trainer._update_actor = raising(error)
    with monkeypatch.context() as patched:
        patched.setattr(VerlRun, "finish", raising(ZeroDivisionError("ours")))
        attach(trainer, run_dir="run")
        with pytest.raises(RuntimeError) as caught:
            trainer.fit()
    assert caught.value is error
    assert "looking at an error of the trainer failed" in caplog.text
    from dataproto_audit.integrations import verl_run
    from dataproto_audit.integrations.attach import _LIVE

    verl_run.AT_WORK.clear()
    for attachment in list(_LIVE):
        attachment.detach()


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("name", ["_get_gen_batch", "generate_sequences"])
def test_healthy_prompts_are_not_accused(
    verl: ModuleType, caplog: pytest.LogCaptureFixture, name: str, step: int
) -> None:
    """Their uids are one a prompt, and they are fewer than the rows that workers share."""
    from dataproto_audit.replay.replay import replay

    trainer, error = make(verl, steps=2), RuntimeError("theirs")
    owner = trainer if name == "_get_gen_batch" else trainer.async_rollout_manager
    own = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if trainer.global_steps == step:
            raise error
        return own(*args, **kwargs)

    setattr(owner, name, call)
    assert fitted(trainer) is error
    assert "Diagnosis: nothing wrong was found in its input (input " in caplog.text
    assert [f for one in replay("run") for f in one.report.findings] == []


def test_broken_prompts_are_accused(verl: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(verl)

    def broken(batch: Any, *_: Any, **__: Any) -> Any:
        batch.non_tensor_batch["uid"] = batch.non_tensor_batch["uid"][:-1]
        raise ValueError("theirs")

    trainer.async_rollout_manager.generate_sequences = broken
    fitted(trainer)
    assert "uid" in caplog.text.split("Diagnosis:")[1]


# -- without tables --------------------------------------------------------------------------------


def tableless(trainer: Any, **settings: Any) -> None:
    with pytest.raises(RuntimeError), attach(trainer, run_dir="run", tables=False, **settings):
        trainer.fit()


def test_the_input_is_kept_without_tables_too(
    verl: ModuleType, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # the second run keeps what the first one kept
        trainer = make(verl)
        trainer._update_actor = raising(RuntimeError("x"))
        tableless(trainer)
    for place in ("run", "run-2"):
        [kept] = Trace(place).step(1).boundaries
        assert kept.name == "00_update_actor_before_input"
        assert kept.view().rows == 16
        assert f"Its input is kept: {place}/trace" in caplog.text
        assert [path.name for path in Path(place).iterdir()] == ["trace"]
    assert "no tables, as asked for; a batch is kept in run-2" in capsys.readouterr().err
    with attach(make(verl), run_dir="run") as attached:
        attached.runs[0].trainer.fit()
    assert open_run("run-3").summary["run_dir"] == "run-3"
    assert Trace("run").steps == [1]


def test_the_first_nan_is_kept_without_tables_too(verl: ModuleType) -> None:
    trainer = make(verl)
    original = trainer._compute_old_log_prob

    def not_finite(batch: Any) -> Any:
        out, more = original(batch)
        out.batch["old_log_probs"][0, 0] = float("nan")
        return out, more

    trainer._compute_old_log_prob = not_finite
    with attach(trainer, run_dir="run", tables=False):
        trainer.fit()
    assert Trace("run").step(1).boundaries[0].part == "not_finite"


def test_a_healthy_run_without_tables_makes_no_folder(verl: ModuleType) -> None:
    trainer = make(verl)
    with attach(trainer, run_dir="run", tables=False):
        trainer.fit()
    assert not Path("run").exists()


def test_without_the_recorder_and_without_tables_nothing_is_kept(verl: ModuleType) -> None:
    trainer = make(verl)
    trainer._update_actor = raising(RuntimeError("x"))
    tableless(trainer, flight_recorder=False)
    assert not Path("run").exists()


def test_a_disk_that_refuses_is_said_once(
    verl: ModuleType, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "mkdir", raising(PermissionError(13, "no")))
    trainer = make(verl)
    trainer._update_actor = raising(RuntimeError("x"))
    tableless(trainer)
    assert caplog.text.count("DPA802") == 1
    assert "Nothing can be kept" in caplog.text
    assert "Diagnosis:" in caplog.text
    assert "DPA904" not in caplog.text
