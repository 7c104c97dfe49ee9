"""The catalogue of codes and the errors that carry them."""

import pickle
import re

import pytest

from dataproto_audit.catalogue import EXAMPLES, REPORTS
from dataproto_audit.codes import (
    CAUSES,
    CODES,
    CodedError,
    InternalError,
    ProtocolError,
    RunError,
    UsageError,
)

FAMILIES = "123456789"


@pytest.mark.parametrize("code", CODES)
def test_an_entry_is_complete(code: str) -> None:
    entry = CODES[code]
    assert entry.code == code
    assert re.fullmatch(r"DPA[1-9]\d\d", code)
    assert code[3] in FAMILIES
    assert entry.title
    assert not entry.title.endswith(".")
    assert entry.meaning.endswith(".")
    assert not entry.fix or entry.fix.endswith(".")
    assert set(entry.causes) <= set(CAUSES)
    assert len(set(entry.causes)) == len(entry.causes)


def test_codes_are_in_order_and_titles_are_distinct() -> None:
    assert list(CODES) == sorted(CODES)
    titles = [entry.title for entry in CODES.values()]
    assert len(set(titles)) == len(titles)


def test_every_cause_is_a_word_with_a_meaning_and_is_used_somewhere() -> None:
    for cause, meaning in CAUSES.items():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", cause)
        assert meaning
    assert set().union(*(entry.causes for entry in CODES.values())) == set(CAUSES)


@pytest.mark.parametrize(
    ("kind", "exit_code"), [(UsageError, 2), (RunError, 3), (InternalError, 4), (CodedError, 2)]
)
def test_coded_errors_travel(kind: type[CodedError], exit_code: int) -> None:
    error = pickle.loads(pickle.dumps(kind("DPA851", "wrong.", "Mend it.")))
    assert type(error) is kind
    assert (error.code, error.message, error.remedy) == ("DPA851", "wrong.", "Mend it.")
    assert error.exit_code == exit_code
    assert str(error) == "DPA851 wrong. Mend it."
    assert isinstance(error, ValueError)


def test_misuse_of_a_batch_is_an_assertion_too() -> None:
    error = pickle.loads(pickle.dumps(ProtocolError("no.", "Yes.", code="DPA109")))
    assert isinstance(error, AssertionError)
    assert (error.code, error.message, error.remedy) == ("DPA109", "no.", "Yes.")
    assert ProtocolError("no.").code == "DPA110"


def test_every_code_about_a_batch_or_a_run_has_an_example():
    assert [c for c in CODES if c[3] in "1234567" and not CODES[c].example] == []
    assert set(EXAMPLES) | set(REPORTS) <= set(CODES)
    assert all(text == text.strip() and "\n" not in text for text in EXAMPLES.values())


def test_reports_name_a_thread():
    threads = [report for code in CODES.values() for report in code.reports]
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+/(issues|pull)/\d+", thread) for thread in threads)
    assert len(threads) > 60
