"""Run a function once a module has been imported, without importing it.

Importing this costs nothing but the standard library, so that it can be done in every process of a
cluster, most of which never import the module waited for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

Then = Callable[[ModuleType], None]


class _Waiting(Loader):
    """Loads as ``inner`` does, then tells who waits."""

    def __init__(self, inner: Loader, finder: OnImport) -> None:
        self._inner, self._finder = inner, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The module that the inner loader creates."""
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module; from then on it is an ordinary one."""
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        self._finder.arrived(module)


class OnImport(MetaPathFinder):
    """Calls ``then(module)`` after ``name`` was imported, or at once where it was already.

    ``then`` must not raise: an error of it would look like a failed import.
    """

    def __init__(self, name: str, then: Then) -> None:
        self.name, self._then = name, then
        self._busy = False

    def install(self) -> None:
        """Begin to wait."""
        module = sys.modules.get(self.name)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            self._then(module)
        elif self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Wait no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def arrived(self, module: ModuleType) -> None:
        """The module is there: tell who waits, once."""
        self.remove()
        self._then(module)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of others for the module waited for, with our loader around theirs."""
        if fullname != self.name or self._busy:
            return None
        self._busy = True
        try:
            spec = find_spec(fullname)
        finally:
            self._busy = False
        if spec is None or spec.loader is None:
            return None
        spec.loader = _Waiting(spec.loader, self)
        return spec
