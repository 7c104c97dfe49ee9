"""What megatron-core 0.16 needs to run on CPUs over gloo. With CUDA all of it does nothing.

=  ===========================================  ==================================================
1  ``torch.cuda.current_device`` names the CPU  used as ``device=`` without asking (rotary
                                                embeddings, p2p and sequence-parallel buffers,
                                                gradient buffers)
2  ``torch.cuda.synchronize`` does nothing      pipeline stages call it around each send
3  :func:`region`                               literal ``device="cuda"``, ``pin_memory=True``,
                                                ``Tensor.cuda()``, and comparisons of
                                                ``Tensor.type()`` with ``torch.cuda.FloatTensor``
                                                (schedules.py, optimizer.py, clip_grads.py,
                                                distrib_optimizer.py, language_module.py,
                                                rope_utils.py)
4  :func:`seed`                                 the tracker of CUDA generators has none to track;
                                                megatron's own inference tracker forks into
                                                nothing. Right as long as dropout is 0.
5  no CUDA generator state in recomputation     random.py saves and restores it around a
                                                recomputed layer
6  :func:`importing`                            fused operations, which we switch off, are compiled
                                                when their module is imported: half of the seconds
                                                that megatron-core takes to start
=  ===========================================  ==================================================

1, 2 and 5 are set once per process by :func:`install`; 3 is a context manager around every call
into megatron-core and patches nothing.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_REPLACED = "megatron_on_cpu"


def install() -> None:
    """Set shims 1, 2 and 5. Does nothing with CUDA, or the second time."""
    if torch.cuda.is_available() or getattr(torch.cuda.synchronize, _REPLACED, False):
        return

    def current_device() -> torch.device:
        return torch.device("cpu")

    def synchronize(device: Any = None) -> None:
        return None

    setattr(synchronize, _REPLACED, True)
    torch.cuda.current_device = current_device  # type: ignore[assignment]  # see the table
    torch.cuda.synchronize = synchronize
    from megatron.core.tensor_parallel import random

    def nothing(*_: Any, **__: Any) -> None:
        return None

    random._get_cuda_rng_state = nothing
    random._set_cuda_rng_state = nothing


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Around the first import of megatron-core: shim 6, and no word of what it finds missing."""
    compile_ = torch.compile
    if not torch.cuda.is_available():
        torch.compile = _leave_alone
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.compile = compile_


def _leave_alone(model: Any = None, **_: Any) -> Any:
    return model if model is not None else (lambda function: function)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that megatron-core's own calls cause: arguments that it passes to
    itself, collectives by their old names, gradients of the optimizer's shards."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        warnings.filterwarnings("ignore", r"`torch\.distributed\..* is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")
        yield


def seed(value: int) -> None:
    """Seed the generators of model-parallel regions (shim 4)."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(
        value, inference_rng_tracker=not torch.cuda.is_available(), force_reset_rng=True
    )


@contextlib.contextmanager
def region() -> Iterator[None]:
    """Around every call into megatron-core: shim 3, and :func:`quiet`."""
    with quiet(), contextlib.nullcontext() if torch.cuda.is_available() else _OnCpu():
        yield


class _OnCpu(TorchFunctionMode):
    """Reads "cuda" as "cpu", and says that CPU tensors are CUDA's where their type is asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        asks_type = func is torch.Tensor.type and len(args) == 1 and not kwargs
        if asks_type and not result.startswith("torch.cuda."):
            return result.replace("torch.", "torch.cuda.", 1)
        return result
