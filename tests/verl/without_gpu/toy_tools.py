"""A tool for a model that cannot call any: two of three answers count as a call of ``add``.

verl's own extension points are used: a parser of calls under a name of its own (``format=tiny``)
and a tool that a YAML file names (toy_tools.yaml).
"""

from types import ModuleType
from typing import Any

SILENT = 3
"""Answers whose ids add up to a multiple of this call nothing."""


def parser(module: ModuleType) -> type:
    """A subclass of verl's ``ToolParser``, which ``module`` defines."""

    class TinyParser(module.ToolParser):  # type: ignore[name-defined, misc]
        async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> Any:
            total = sum(responses_ids)
            if total % SILENT == 0:
                return "", []
            arguments = f'{{"a": {total % 10}, "b": {total % 7}}}'
            return "", [module.FunctionCall(name="add", arguments=arguments)]

    return TinyParser


def __getattr__(name: str) -> type:
    """``AddTool``, made when verl's tools can be imported."""
    if name != "AddTool":
        raise AttributeError(name)
    from verl.tools.base_tool import BaseTool
    from verl.tools.schemas import ToolResponse

    class AddTool(BaseTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
            total = int(parameters["a"]) + int(parameters["b"])
            return ToolResponse(text=f"={total}"), 0.0, {}

    return AddTool
