"""One line when a run begins and one when it ends, wherever a user looks."""

import logging
from types import ModuleType
from typing import Any

import pytest

from dataproto_audit import __version__, attach
from dataproto_audit.integrations.announce import say

from .conftest import make


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("dataproto-audit: ")]


def test_a_run_says_one_line_at_each_end(
    verl: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with attach(run_dir="run", every_n_steps=2, stages="rollout, advantage", rows=8):
        trainer = make(verl, steps=2)
        assert lines(capsys.readouterr().err) == []
        trainer.fit()
    begins, ends = lines(capsys.readouterr().err)
    assert begins == (
        f"dataproto-audit: {__version__} audits RayPPOTrainer of verl 0.7.1: level full, on_fail "
        "warn, every 2 steps, stages rollout, advantage, about 8 rows a step; tables in run"
    )
    assert ends.startswith("dataproto-audit: 2 steps, 5 boundaries; checks: ")
    assert " not checkable" in ends
    assert "findings: 0 fail, 0 warn, " in ends
    assert ends.endswith(" % of the run's CPU time; tables in run")


def test_a_run_that_raises_says_its_last_line_too(
    verl: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make(verl)
    trainer._update_actor = lambda batch: 1 / 0
    with attach(trainer, tables=False), pytest.raises(ZeroDivisionError):
        trainer.fit()
    begins, ends = lines(capsys.readouterr().err)
    assert begins.endswith("no tables, as asked for")
    assert "; no tables, as asked for; a batch is kept in reports/verl-toy-" in ends


@pytest.mark.parametrize("settings", [{"level": "off"}, {"ranks": (0,)}])
def test_a_process_that_is_left_out_says_nothing(
    verl: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, Any],
) -> None:
    monkeypatch.setenv("RANK", "1")
    with attach(**settings):
        make(verl).fit()
    assert lines(capsys.readouterr().err) == []


def test_news_go_to_the_log_where_it_shows_them(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, "dataproto_audit"):
        say("hello")
    assert [r.getMessage() for r in caplog.records] == ["hello"]
    assert capsys.readouterr().err == ""
    say("again")  # the log is at WARNING here
    assert capsys.readouterr().err == "dataproto-audit: again\n"


def test_a_closed_stream_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    say("unheard")
