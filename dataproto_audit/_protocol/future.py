"""A batch that is still being computed by Ray workers."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tensordict import TensorDict

from dataproto_audit._protocol.merge import concat_batches
from dataproto_audit.codes import ProtocolError, UsageError


def _nth_chunk(data: Any, *, number: int, chunks: int) -> Any:
    return data.chunk(chunks=chunks)[number]


@dataclass
class DataProtoFuture:
    """The outputs of one call on a worker group, not fetched yet; it can only be handed on.

    ``collect_fn`` joins the parts of all workers, ``dispatch_fn`` then picks what the receiver
    needs, so the driver never waits for the data.
    """

    collect_fn: Callable[[list[Any]], Any]
    futures: list[Any]
    dispatch_fn: Callable[[Any], Any] | None = None

    @staticmethod
    def concat(data: Sequence[Any]) -> "DataProtoFuture":
        """Join object references; the batches behind them are concatenated when fetched."""
        from dataproto_audit.protocol import DataProto

        return DataProtoFuture(collect_fn=DataProto.concat, futures=list(data))

    def chunk(self, chunks: int) -> list["DataProtoFuture"]:
        """Make one future per receiver; each cuts its own chunk out when fetched."""
        cuts = [partial(_nth_chunk, number=number, chunks=chunks) for number in range(chunks)]
        return [
            DataProtoFuture(collect_fn=self.collect_fn, futures=self.futures, dispatch_fn=cut)
            for cut in cuts
        ]

    def get(self) -> Any:
        """Wait for all workers, join their batches, pick the receiver's part.

        Errors: :class:`UsageError` without ray; a worker's own exception as ray raises it.
        """
        ray = sys.modules.get("ray")  # whoever holds a reference has imported it
        if ray is None:
            raise UsageError(
                "DPA858",
                "a DataProtoFuture waits for Ray workers, and ray is not in use here.",
                "Import ray first; it comes with the extra 'trainer'.",
            )
        from dataproto_audit.protocol import DataProto

        parts = ray.get(self.futures)
        for number, part in enumerate(parts):
            if not isinstance(part, (DataProto, TensorDict)):
                raise ProtocolError(
                    f"worker {number} returned a {type(part).__name__}, not a DataProto."
                )
        if parts and isinstance(parts[0], TensorDict):
            joined: Any = concat_batches(parts)
        else:
            joined = self.collect_fn(parts)
        return joined if self.dispatch_fn is None else self.dispatch_fn(joined)
