"""Saved batches: verl's file format (one pickle of one DataProto), written whole, read safely."""

import os
import pickle
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from dataproto_audit._protocol.build import check_rows
from dataproto_audit._protocol.safe.errors import RefusedError
from dataproto_audit._protocol.safe.explain import explained, read_bytes
from dataproto_audit._protocol.safe.load import Proto, load, name_of
from dataproto_audit.atomic import atomic_write_bytes
from dataproto_audit.codes import ProtocolError

State = tuple[TensorDict | None, dict[str, Any], dict[str, Any]]

_PROTOCOL = 4  # what verl's own pickle.dump writes on the Pythons it supports


def write_state(path: str | os.PathLike[str], state: tuple[Any, Any, Any]) -> None:
    """Write a state tuple as the pickle that verl writes for a DataProto; atomically.

    The class is named ``verl.protocol.DataProto``, so that verl reads the file; pickle would
    import that name to write it, so its few opcodes are put around the pickled state instead.
    """
    body = _dump(state)
    header = b"".join(
        (
            pickle.PROTO + bytes([_PROTOCOL]),
            _short_text("verl.protocol"),
            _short_text("DataProto"),
            pickle.STACK_GLOBAL + pickle.EMPTY_TUPLE + pickle.NEWOBJ,
        )
    )
    # The body starts with its own PROTO (2 bytes) and ends with STOP. BUILD takes the place of
    # that STOP, since the frame around it counts its bytes.
    atomic_write_bytes(path, header + body[2:-1] + pickle.BUILD + pickle.STOP)


def _short_text(text: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode()


def _dump(state: tuple[Any, Any, Any]) -> bytes:
    try:
        return pickle.dumps(state, protocol=_PROTOCOL)
    except Exception as error:  # pickling runs the values' own code, which may raise anything
        raise ProtocolError(
            f"{_culprit(state)} cannot be pickled ({error}).", "Drop it before saving."
        ) from error


def _culprit(state: tuple[Any, Any, Any]) -> str:
    for part, name in ((state[1], "non_tensor_batch"), (state[2], "meta_info")):
        for key, value in part.items():
            try:
                pickle.dumps(value, protocol=_PROTOCOL)
            except Exception:  # noqa: BLE001 # as above
                return f"{name}[{key!r}]"
    return "the batch"


def read_state_file(path: str | os.PathLike[str]) -> State:
    """Read a file written by :func:`write_state` or by verl, in either encoding.

    Errors: :class:`UsageError` for a file that is missing, broken (``DPA810``), asks for anything
    besides plain data (``DPA811``) or claims more than it holds (``DPA812``). Nothing that the
    file supplies is executed.
    """
    place = Path(path)
    data = read_bytes(place)
    try:
        saved, opaque = load(data)
        if opaque:
            raise RefusedError(opaque[0])
        if not isinstance(saved, Proto):
            raise ValueError(f"a {name_of(saved)} where a DataProto belongs")
        batch = None
        if saved.batch is not None:
            batch = TensorDict(saved.batch.fields, batch_size=saved.batch.batch_size)
        check_rows(batch, saved.arrays)
        return batch, saved.arrays, saved.meta
    except Exception as error:  # the bytes of a broken file can make a decoder raise anything
        raise explained(error, place, data, what="a saved DataProto", remedy=_hint(data)) from error


def _hint(data: bytes) -> str:
    if data.startswith(b"PK"):
        return "It looks like an archive of torch.save; a DataProto is saved by save_to_disk."
    return "Save it again with DataProto.save_to_disk."
