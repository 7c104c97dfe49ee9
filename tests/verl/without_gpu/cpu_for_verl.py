"""Lets verl's own trainer run where there is no accelerator; loaded by VERL_USE_EXTERNAL_MODULES.

verl is written for accelerators; what it asks of one is answered here for a CPU, in every process,
without touching its files. Nothing of this belongs to the audit.
"""

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType

import torch
import torch.distributed

from dataproto_audit.integrations.on_import import OnImport


def when_imported(name: str) -> Callable[[Callable[[ModuleType], None]], None]:
    """Run the decorated function on the module once it is there."""

    def decorate(then: Callable[[ModuleType], None]) -> None:
        OnImport(name, then).install()

    return decorate


def _nothing(*_args, **_kwargs) -> None:
    return None


# -- the device: memory figures, random states, properties that torch.cpu does not have ------------
class _Properties:
    name = "cpu"
    total_memory = 8 << 30


_ANSWERS = {
    "get_device_name": lambda *_: "cpu",
    "get_device_properties": lambda *_: _Properties(),
    "mem_get_info": lambda *_: (4 << 30, 8 << 30),
    "get_rng_state": lambda *_: torch.get_rng_state(),
    "set_rng_state": lambda state, *_: torch.set_rng_state(state),
}
_ANSWERS |= dict.fromkeys(
    ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"),
    lambda *_: 0,
)
_ANSWERS |= dict.fromkeys(
    ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "manual_seed", "manual_seed_all",
     "set_per_process_memory_fraction"),
    _nothing,
)  # fmt: skip
for _name, _answer in _ANSWERS.items():
    if not hasattr(torch.cpu, _name):
        setattr(torch.cpu, _name, _answer)

# -- collectives: gloo for everything --------------------------------------------------------------
_init_process_group = torch.distributed.init_process_group


def _with_gloo(backend=None, **kwargs):
    return _init_process_group(
        backend="cpu:gloo" if isinstance(backend, str) else backend, **kwargs
    )


torch.distributed.init_process_group = _with_gloo

import verl.utils.device  # noqa: E402 - verl itself is being imported and loads this at its end

verl.utils.device.get_nccl_backend = lambda: "gloo"
if importlib.util.find_spec("verl.plugin") is not None:  # since 0.9 platforms can be plugged in
    import cpu_platform

    cpu_platform.install()

# -- pinned memory needs an accelerator; CPU offload of FSDP asks for it ---------------------------
_pin_memory = torch.Tensor.pin_memory


def _unpinned(self, *args, **kwargs):
    try:
        return _pin_memory(self, *args, **kwargs)
    except RuntimeError:
        return self


torch.Tensor.pin_memory = _unpinned


@when_imported("torch.distributed.fsdp._init_utils")
def _parameters_may_be_on_the_cpu(module: ModuleType) -> None:
    module._check_module_states_for_sync_module_states = _nothing


@when_imported("verl.utils.fsdp_utils")
def _nothing_to_offload(module: ModuleType) -> None:
    for verb in ("load_fsdp_model_to_gpu", "offload_fsdp_model_to_cpu", "load_fsdp_optimizer",
                 "offload_fsdp_optimizer"):  # fmt: skip
        setattr(module, verb, _nothing)


@when_imported("verl.utils.attention_utils")
def _unpad_without_flash_attention(module: ModuleType) -> None:
    def functions():
        from verl.utils import npu_flash_attn_utils as plain

        return plain.index_first_axis, plain.pad_input, plain.rearrange, plain.unpad_input

    module._get_attention_functions = functions


@when_imported("verl.workers.engine.fsdp.transformer_impl")
def _engines_for_the_cpu(module: ModuleType) -> None:
    from verl.workers.engine.base import EngineRegistry

    for backends in EngineRegistry._engines.values():
        for devices in backends.values():
            if isinstance(devices, dict) and "cuda" in devices:
                devices.setdefault("cpu", devices["cuda"])


@when_imported("verl.utils.model")
def _critic_without_flash_attention(module: ModuleType) -> None:
    import transformers

    cls = transformers.AutoModelForTokenClassification
    load = cls.from_pretrained

    def loaded(*args, **kwargs):
        if kwargs.get("attn_implementation") == "flash_attention_2":
            kwargs["attn_implementation"] = "sdpa"
        return load(*args, **kwargs)

    cls.from_pretrained = staticmethod(loaded)


# -- the rollout engine ----------------------------------------------------------------------------
@when_imported("verl.workers.rollout.base")
def _adapter(module: ModuleType) -> None:
    module._ROLLOUT_REGISTRY[("tiny", "async")] = "tiny_rollout.TinyAdapter"


@when_imported("verl.workers.rollout.replica")
def _replica(module: ModuleType) -> None:
    def load():
        from tiny_rollout import TinyReplica

        return TinyReplica

    module.RolloutReplicaRegistry.register("tiny", load)


@when_imported("verl.experimental.agent_loop.tool_parser")
def _tool_calls(module: ModuleType) -> None:
    from toy_tools import parser

    module.ToolParser.register("tiny")(parser(module))


assert importlib.util.find_spec("tiny_rollout") is not None, sys.path
