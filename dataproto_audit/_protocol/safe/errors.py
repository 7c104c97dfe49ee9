"""What a file may ask for, and what a reader says when it asks for more."""

from dataclasses import dataclass, field


class RefusedError(ValueError):
    """The file asks for a name or an operation that saved batches do not need."""


class TooLargeError(ValueError):
    """The file claims more than it holds."""


@dataclass(frozen=True)
class Opaque:
    """Stands for an object, function or class of the file that nobody here knows.

    It carries the name only. The file's arguments and state for it are dropped: an object nobody
    can build tells nothing, and states often refer back to their owners.
    """

    name: str

    def __repr__(self) -> str:
        return f"<opaque {self.name}>"


# A file may repeat its bytes (rows that share memory, expanded tensors) so often and no more.
FREE_BYTES = 1 << 28
REPEATS = 16
MAX_DEPTH = 100


@dataclass
class Budget:
    """How many bytes and nodes the values of one file may have together, whatever it claims.

    Healthy files share memory between fields and expand masks, so the limit is a multiple of the
    file's own size, with a quarter of a gigabyte for free.
    """

    file_bytes: int
    used: int = 0
    opaque: dict[str, None] = field(default_factory=dict)

    @property
    def limit(self) -> int:
        """Bytes that all values may have together."""
        return FREE_BYTES + REPEATS * self.file_bytes

    def charge(self, size: int, what: str) -> None:
        """Count ``size`` bytes for ``what``.

        Errors: :class:`TooLargeError` beyond the limit.
        """
        self.used += size
        if self.used > self.limit:
            raise TooLargeError(
                f"{what} claims {size} bytes, in a file of {self.file_bytes} bytes that may hold "
                f"{self.limit} in all"
            )
