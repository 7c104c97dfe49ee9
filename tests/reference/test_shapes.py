import os
import subprocess
import sys

import jaxtyping
import pytest
import torch
from torch import Tensor

from dataproto_audit.reference.shapes import Mask, Tokens, as_bool, checked


@checked
def _take(values: Tokens, mask: Mask, *, factor: float = 1.0) -> Tokens:
    return values * factor


def test_the_message_names_the_parameter_and_both_sizes() -> None:
    with pytest.raises(jaxtyping.TypeCheckError) as caught:
        _take(torch.zeros(2, 3), torch.ones(2, 4, dtype=torch.int64))
    message = str(caught.value)
    assert "parameter 'mask'" in message
    assert "i64[2,4]" in message
    assert "response=3" in message


@pytest.mark.parametrize(
    "values", [torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2), [[0.0, 0.0, 0.0]]]
)
def test_values_must_be_a_float_matrix(values: object) -> None:
    with pytest.raises(jaxtyping.TypeCheckError, match="parameter 'values'"):
        _take(values, torch.ones(2, 3, dtype=torch.int64))


def test_an_integer_from_a_config_stands_for_a_float() -> None:
    _take(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.int64), factor=2)


def test_any_float_precision_is_taken() -> None:
    mask = torch.ones(1, 1, dtype=torch.bool)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert _take(torch.zeros(1, 1, dtype=dtype), mask).dtype == dtype


def test_anything_but_zero_is_attended() -> None:
    assert as_bool(torch.tensor([0, 1, 2, -1])).tolist() == [False, True, True, True]
    mask: Tensor = torch.tensor([True, False])
    assert as_bool(mask) is mask


def test_the_checks_can_be_switched_off() -> None:
    code = (
        "import torch; from dataproto_audit.reference.kl import kl_estimate;"
        "print(kl_estimate(torch.zeros(2, 1), torch.zeros(1, 3), 'k1').shape)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"JAXTYPING_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "[2, 3]" in ran.stdout
