"""Jagged tensors of parts: quiet, and without what takes seconds to import."""

import subprocess
import sys

import numpy as np
import torch

from dataproto_audit.storage import jagged_of_parts, object_array


def test_jagged_of_parts_is_quiet_and_cheap_to_import():
    """torch's own calls log on stderr; tensordict and dynamo are not needed to open a file."""
    code = (
        "import sys, torch\n"
        "from dataproto_audit.dump.readers.tables import jagged_of\n"
        "made = jagged_of([torch.zeros(2), torch.zeros(1)])\n"
        "print(made.is_nested, 'tensordict' in sys.modules, 'torch._dynamo' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.split() == ["True", "False", "False"]
    assert "is_fx_tracing" not in done.stderr


def test_rows_are_cut_out_of_the_values():
    made = jagged_of_parts(torch.arange(5), torch.tensor([0, 2, 5]))
    assert [row.tolist() for row in made.unbind()] == [[0, 1], [2, 3, 4]]
    part = jagged_of_parts(torch.arange(5), torch.tensor([0, 2, 5]), torch.tensor([1, 2]))
    assert [row.tolist() for row in part.unbind()] == [[0], [2, 3]]


def test_lists_of_one_length_stay_objects():
    assert object_array([[1, 2], [3, 4]]).shape == (2,)
    assert object_array(np.zeros((2, 3))).dtype == object
