"""Numbers, durations, curves, and text that may be hostile."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataproto_audit.render import text


@given(st.text())
def test_visible_text_holds_no_control_characters(given_text: str) -> None:
    shown = text.visible(given_text)
    assert all(c.isprintable() or c in "\n\t" for c in shown)


def test_visible_text_keeps_what_is_harmless() -> None:
    assert text.visible("a 🙂 é\n\tb") == "a 🙂 é\n\tb"
    assert text.visible("\x1b[31mred\x1b]0;title\x07") == "\\x1b[31mred\\x1b]0;title\\x07"
    assert text.visible("a\rb\u202ec\ud800") == "a\\rb\\u202ec\\ud800"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"), (3, "3"), (3.0, "3"), (0.123456, "0.1235"), (1e-7, "1e-07"),
        ("a\x00", "a\\x00"), (math.nan, "nan"), (-math.inf, "-inf"), (1e300, "1e+300"), (0.0, "0"),
    ],
)  # fmt: skip
def test_numbers(value: object, shown: str) -> None:
    assert text.number(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "-"), (math.nan, "-"), (0, "0:00"), (-3, "0:00"), (61.6, "1:02"), (3723, "1:02:03")],
)
def test_durations(seconds: float | None, shown: str) -> None:
    assert text.duration(seconds) == shown


@pytest.mark.parametrize(
    ("given_counts", "shown"),
    [(None, "none"), (0, "none"), (3, "3"), ({}, "none"), ({"fail": 0}, "none"),
     ({"fail": 2, "warn": 0, "info": 1}, "2 fail, 1 info")],
)  # fmt: skip
def test_counts(given_counts: object, shown: str) -> None:
    assert text.counts(given_counts) == shown  # type: ignore[arg-type]


def test_the_reward_is_the_first_known_metric() -> None:
    assert text.reward_of({"critic/rewards/mean": 1.0, "critic/score/mean": 0.5}) == 0.5
    assert text.reward_of({"reward/mean": 0.0}) == 0.0
    assert text.reward_of({"lr": 1.0}) is None


def test_sparklines_rise_and_leave_gaps() -> None:
    assert text.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert text.sparkline([0, 0, 7, 7], width=2) == "▁█"
    assert text.sparkline([0, math.nan, 1], bars=text.ASCII_BARS) == "_ @"
    assert text.sparkline([2.0, 2.0]) == "▄▄"
    assert text.sparkline([]) == text.sparkline([1.0], width=0) == ""
    assert text.sparkline([math.nan]) == " "


@given(st.lists(st.floats(-1e100, 1e100) | st.just(math.nan)), st.integers(1, 50))
def test_sparklines_fit_their_width(values: list[float], width: int) -> None:
    assert len(text.sparkline(values, width=width)) == min(width, len(values))
