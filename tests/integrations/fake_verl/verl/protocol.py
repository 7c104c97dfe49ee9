"""The same public class as verl's."""

from dataproto_audit.protocol import DataProto

__all__ = ["DataProto"]
