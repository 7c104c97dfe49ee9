"""A stand-in for verl: the calls that attaching hooks into, in the order of its trainer."""

import importlib
import os

from .protocol import DataProto

__all__ = ["DataProto"]

for _name in filter(None, os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")):
    importlib.import_module(_name)
