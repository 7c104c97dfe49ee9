"""What ``doctor`` says of a configuration: one sentence each, with a code and a level."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dataproto_audit.findings import Severity


@dataclass(frozen=True)
class Problem:
    """``fail``: the run stops, or trains on wrong numbers. ``warn``: it may. ``code`` is what the
    audit would report; ``defect`` the number of a known defect of verl, '' where the
    configuration itself is at fault."""

    level: Severity
    code: str
    text: str
    remedy: str = ""
    defect: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)

    def __str__(self) -> str:
        name = f"{self.code} {self.defect}".strip()
        return f"{self.level}  {name}  {self.text} {self.remedy}".rstrip()
