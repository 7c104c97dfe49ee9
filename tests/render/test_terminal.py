"""The one module that others import for the terminal."""

import importlib

import pytest

from dataproto_audit.render import terminal


def test_every_name_can_be_imported() -> None:
    for name in terminal.__all__:
        assert callable(getattr(terminal, name))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        importlib.import_module("dataproto_audit.render.terminal").nothing  # noqa: B018
