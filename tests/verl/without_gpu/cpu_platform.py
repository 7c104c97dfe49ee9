"""A platform plugin for verl 0.9: the CPU, which Ray is told to count as GPUs."""

import contextlib
from collections.abc import Iterator
from types import ModuleType

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry, set_platform


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """Everything that verl asks of an accelerator, answered for one that is not there."""

    @property
    def device_name(self) -> str:
        """The device as torch names it."""
        return "cpu"

    @property
    def vendor_name(self) -> str:
        """Nobody's."""
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        """Where memory figures and streams are asked for."""
        return torch.cpu

    def is_available(self) -> bool:
        """Always."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Always."""
        return True

    def current_device(self) -> torch.device:
        """The only one."""
        return torch.device("cpu")

    def device_count(self) -> int:
        """One."""
        return 1

    def set_device(self, device_index: int) -> None:
        """There is no choice."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing runs beside the program."""

    def manual_seed(self, seed: int) -> None:
        """The generator of the CPU."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """The same."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """No allocator of its own."""

    def empty_cache(self) -> None:
        """No cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """None."""
        return None, None

    def communication_backend_name(self) -> str:
        """Collectives on a CPU."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """A variable that nobody reads."""
        return "CPU_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """No profiler."""
        yield

    def profiler_start(self) -> None:
        """No profiler."""

    def profiler_stop(self) -> None:
        """No profiler."""

    def ray_resource_name(self) -> str:
        """Ray is started with GPUs that are none."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Nothing to protect."""
        return []

    def is_ipc_supported(self) -> bool:
        """No shared device memory."""
        return False

    def cudart(self) -> None:
        """No runtime library."""


def install() -> None:
    """Use it in this process."""
    set_platform(PlatformCPU())
