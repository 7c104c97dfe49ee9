"""One line that is redrawn on a terminal, few plain lines elsewhere."""

import io
import os
import shutil
import subprocess
import sys

import pytest

from dataproto_audit.render import progress
from dataproto_audit.render.progress import Progress

STAGES = ["rollout", "reward", "update_actor"]


class _Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _wide_and_no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((200, 50)))


def _run(shown: Progress, steps: int, *, findings_at: int = 0) -> None:
    shown.start(steps, STAGES)
    for step in range(1, steps + 1):
        for stage in STAGES:
            shown.stage(step, stage)
        findings = {"fail": 1} if findings_at and step >= findings_at else {"fail": 0}
        shown.step_done(step, {"critic/score/mean": step / 100, "lr": 1.0}, findings, eta=90)
    shown.stop()


def test_plain_lines_are_few_and_have_no_escapes() -> None:
    out = io.StringIO()
    _run(Progress(file=out), 100)
    lines = out.getvalue().splitlines()
    assert len(lines) == 22  # the head, the first step, every fifth
    assert lines[0] == "100 steps of 3 stages: rollout, reward, update_actor"
    assert lines[1].startswith("step 1/100  reward 0.01  findings none  eta 1:30  ")
    assert lines[-1].startswith("step 100/100  reward 1  ")
    assert "\x1b" not in out.getvalue()
    assert "\r" not in out.getvalue()


def test_a_step_with_new_findings_is_always_shown() -> None:
    out = io.StringIO()
    _run(Progress(file=out, every=1000), 100, findings_at=37)
    steps = [line.split()[1] for line in out.getvalue().splitlines()[1:]]
    assert steps == ["1/100", "37/100", "100/100"]
    assert "findings 1 fail" in out.getvalue()


def test_the_live_line_is_redrawn_and_wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "MIN_INTERVAL_S", 0.0)
    out = _Terminal()
    shown = Progress(file=out)
    assert shown.live
    _run(shown, 3, findings_at=2)
    text = out.getvalue()
    assert "\n" not in text
    draws = text.split("\r\x1b[2K")
    assert draws[1] == "step 1/3  rollout  findings none  eta -"
    assert draws[-2].startswith("step 3/3  reward 0.03  ▁")
    assert draws[-2].endswith("█  findings 1 fail  eta 1:30")
    assert draws[-1] == ""


def test_the_live_line_is_throttled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "MIN_INTERVAL_S", 1000.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: 5000.0)
    out = _Terminal()
    _run(Progress(file=out), 50)
    assert out.getvalue().count("step ") == 1


def test_the_live_line_never_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "MIN_INTERVAL_S", 0.0)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((20, 5)))
    out = _Terminal()
    _run(Progress(file=out), 3)
    assert max(map(len, out.getvalue().split("\r\x1b[2K"))) == 19


def test_messages_stand_above_the_line_and_are_harmless() -> None:
    out = _Terminal()
    shown = Progress(file=out)
    shown.start(3, STAGES)
    shown.stage(1, "rollout")
    shown.message("saved \x1b[31m")
    assert "\r\x1b[2Ksaved \\x1b[31m\n" in out.getvalue()
    assert out.getvalue().endswith("step 1/3  rollout  findings none  eta -")


def test_a_terminal_without_unicode_gets_plain_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "MIN_INTERVAL_S", 0.0)
    out = _Terminal()
    monkeypatch.setattr(_Terminal, "encoding", "ascii")
    _run(Progress(file=out), 3)
    assert out.getvalue().isascii()


@pytest.mark.parametrize(("name", "value"), [("CI", "true"), ("TERM", "dumb")])
def test_ci_and_dumb_terminals_get_plain_lines(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert not Progress(file=_Terminal()).live


def test_the_eta_is_estimated_when_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 4.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    shown = Progress(file=out)
    shown.start(12, STAGES, first_step=3)  # resumed: two steps took four seconds
    shown.step_done(4, {}, 0)
    monkeypatch.undo()
    assert "eta 0:16" in shown._line()


def test_a_closed_stream_does_not_end_the_run() -> None:
    out = io.StringIO()
    shown = Progress(file=out)
    out.close()
    shown.start(1, STAGES)
    shown.step_done(1, {})
    shown.message("x")
    shown.stop()


def test_calls_in_any_order_are_harmless() -> None:
    out = _Terminal()
    with Progress(file=out) as shown:
        shown.step_done(1, {})
        shown.stage(1, "rollout")
        shown.message("hello")
        shown.stop()
    assert out.getvalue() == "hello\n"


def test_progress_imports_neither_rich_nor_pandas() -> None:
    code = (
        "import sys; from dataproto_audit.render.terminal import Progress;"
        "print(*(set(sys.modules) & {'rich', 'pandas', 'pandera', 'pyarrow', 'torch'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
