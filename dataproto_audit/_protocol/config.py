"""The process-wide setting of batches: auto padding, named as verl names it."""

import os

from dataproto_audit.codes import ProtocolError


class _ConfigMeta(type):
    auto_padding_key = "_verl_auto_padding"
    _enabled = False

    @property
    def auto_padding(cls) -> bool:
        """Whether batches are padded to the rank count: set here or by ``VERL_AUTO_PADDING``."""
        return cls._enabled or os.environ.get("VERL_AUTO_PADDING", "").upper() in ("TRUE", "1")

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        if not isinstance(enabled, bool):
            raise ProtocolError(f"auto_padding is a boolean, not {enabled!r}.")
        cls._enabled = enabled


class DataProtoConfig(metaclass=_ConfigMeta):
    """Settings of all batches of the process; never instantiated."""
