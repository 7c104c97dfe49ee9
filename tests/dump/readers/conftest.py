"""Where the copied samples are, and pickles that mean harm."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def samples() -> Path:
    """Files that real runs wrote; see the README there."""
    return Path(__file__).parents[2] / "data" / "samples"
