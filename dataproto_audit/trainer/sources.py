"""Where prompts come from: reasoning-gym generators by name, parquet and JSONL in verl's schema.

A row of verl's schema: ``prompt`` (list of chat messages, or text), ``data_source``,
``reward_model`` ({"style", "ground_truth"}) and optionally ``extra_info``.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dataproto_audit.codes import UsageError

Messages = list[dict[str, Any]]
#: reasoning-gym draws row i from seed + i, so the splits' seeds must lie further apart than rows.
SEED_DISTANCE = 10**9
SPLITS = ("train", "val", "warmup")


@dataclass(frozen=True)
class Row:
    """One task. ``raw_prompt`` is text, or chat messages where a chat template will be applied."""

    raw_prompt: str | Messages
    data_source: str
    reward_model: dict[str, Any]
    extra_info: dict[str, Any]


class Source(Protocol):
    """A finite, indexable set of rows; row i is the same whenever it is asked for."""

    name: str

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row:
        """Row ``index``."""
        ...


class GeneratorSource:
    """A reasoning-gym data set. ``expression`` prompts are the bare task (``5+3=``).

    Rows other than expressions keep the generator's metadata in ``extra_info``, which its own
    scorer needs.
    """

    def __init__(
        self,
        name: str,
        arguments: Mapping[str, Any],
        *,
        size: int,
        seed: int,
        style: str,
        chat: bool,
    ) -> None:
        self.name = name
        self._style = style
        self._chat = chat
        self._data = _create(name, {**arguments, "size": size, "seed": seed})

    def __len__(self) -> int:
        return len(self._data)

    def row(self, index: int) -> Row:
        """Generate row ``index``; UsageError DPA851 if it has no expression but should."""
        entry = self._data[index]
        text, extra = str(entry["question"]), {"index": index}
        if self._style == "expression":
            expression = entry["metadata"].get("expression")
            if not isinstance(expression, str):
                raise UsageError(
                    "DPA851",
                    f"data.prompt_style=expression: tasks of {self.name!r} have no expression.",
                    "Use prompt_style=verbatim.",
                )
            text = expression.replace(" ", "") + "="
        else:
            extra["metadata"] = entry["metadata"]
        prompt: str | Messages = [{"role": "user", "content": text}] if self._chat else text
        reward_model = {"style": "rule", "ground_truth": str(entry["answer"])}
        return Row(prompt, self.name, reward_model, extra)


def _create(name: str, arguments: Mapping[str, Any]) -> Any:
    gym = reasoning_gym()
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        import difflib

        near = difflib.get_close_matches(name, DATASETS, 3)
        raise UsageError(
            "DPA851",
            f"data.generator={name!r} is not a reasoning-gym data set.",
            f"Did you mean {' or '.join(near)}?" if near else "See reasoning-gym's gallery.",
        )
    try:
        return gym.create_dataset(name, **arguments)
    except (TypeError, ValueError, AssertionError) as error:  # its configs assert
        raise UsageError(
            "DPA851",
            f"data.generator_args do not fit {name!r} ({error}).",
            "See the configuration class of that generator.",
        ) from error


def reasoning_gym() -> Any:
    """The library; UsageError DPA858 if it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its dependencies warn while they are compiled
            import reasoning_gym as gym
    except ImportError as error:
        raise UsageError(
            "DPA858",
            f"reasoning-gym is not installed ({error}).",
            'Install it: pip install "dataproto-audit[trainer]", or use data.train_files.',
        ) from error
    return gym


class FileSource:
    """Rows of parquet (``.parquet``) or JSONL (any other suffix) files, one after the other.

    Raises UsageError DPA857 naming file, row and column for what cannot be read, lacks a column
    or is empty.
    """

    def __init__(self, files: Sequence[str], *, prompt_key: str, chat: bool) -> None:
        self.name = ", ".join(files)
        self._rows: list[Row] = []
        for file in files:
            path = Path(file)
            if not path.is_file():
                raise UsageError("DPA857", f"{file}: no such file.", "Check data.train_files.")
            read = _parquet if path.suffix == ".parquet" else _jsonl
            for number, raw in read(path, prompt_key):
                self._rows.append(_row(raw, f"{file}, row {number}", prompt_key, chat, number))
        if not self._rows:
            raise UsageError("DPA857", f"{self.name}: no rows.", "Give a file with data.")

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        """Row ``index`` over all files."""
        return self._rows[index]


def _parquet(path: Path, prompt_key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted = (prompt_key, *_COLUMNS)
    try:
        with pq.ParquetFile(path) as file:
            present = file.schema_arrow.names
            _need_columns(str(path), present, prompt_key)
            table = file.read(columns=[name for name in wanted if name in present])
        yield from enumerate(table.to_pylist())
    except (OSError, pa.ArrowException) as error:
        raise UsageError(
            "DPA857", f"{path}: not readable as parquet ({error}).", "Write it again."
        ) from error


def _jsonl(path: Path, prompt_key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                if not line.strip():
                    continue
                raw = json.loads(line)
                where = f"{path}, line {number + 1}"
                if not isinstance(raw, dict):
                    raise UsageError("DPA857", f"{where}: not a JSON object.", _ONE_OBJECT)
                _need_columns(where, list(raw), prompt_key)
                yield number, raw
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("DPA857", f"{path}: not readable ({error}).", _ONE_OBJECT) from error
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            "DPA857", f"{path}, line {number + 1}: not JSON ({error}).", _ONE_OBJECT
        ) from error


_COLUMNS = ("data_source", "reward_model", "extra_info")
_ONE_OBJECT = "One JSON object a line is expected, or a .parquet file."


def _need_columns(where: str, present: Sequence[str], prompt_key: str) -> None:
    missing = [name for name in (prompt_key, *_COLUMNS[:2]) if name not in present]
    if missing:
        raise UsageError(
            "DPA857",
            f"{where}: no column {', '.join(missing)} (there are: {', '.join(present)}).",
            "verl's schema is expected; data.prompt_key names the prompt column.",
        )


def _row(raw: Mapping[str, Any], where: str, prompt_key: str, chat: bool, number: int) -> Row:
    prompt, reward_model = raw[prompt_key], raw["reward_model"]
    messages = (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in prompt)
    )
    if not messages and not (isinstance(prompt, str) and prompt):
        raise UsageError(
            "DPA857",
            f"{where}: {prompt_key} is neither text nor a list of chat messages.",
            'A message is {"role": ..., "content": ...}.',
        )
    if not isinstance(reward_model, dict) or "ground_truth" not in reward_model:
        raise UsageError(
            "DPA857", f"{where}: reward_model has no ground_truth.", "The reward compares with it."
        )
    if chat and not messages:
        prompt = [{"role": "user", "content": prompt}]
    if messages and not chat:
        prompt = "\n".join(message["content"] for message in prompt)
    extra = raw.get("extra_info")
    extra = {"index": number, **(extra if isinstance(extra, dict) else {})}
    return Row(prompt, str(raw["data_source"]), reward_model, extra)


def open_source(data_config: Any, *, split: str) -> Source:
    """The source of a split: ``train``, ``val`` or ``warmup`` (training tasks, other draws).

    Files win over a generator; ``val`` of a generator holds ``val_batch_size`` rows. UsageError
    DPA851 if the configuration names neither.
    """
    chat = bool(data_config.apply_chat_template)
    files = data_config.val_files if split == "val" else data_config.train_files
    if files:
        listed = [str(files)] if isinstance(files, str) else [str(file) for file in files]
        return FileSource(listed, prompt_key=data_config.prompt_key, chat=chat)
    if data_config.generator is None:
        key = "val_files" if split == "val" else "train_files"
        raise UsageError(
            "DPA851", f"neither data.generator nor data.{key} is set.", "Set one of them."
        )
    return GeneratorSource(
        data_config.generator,
        dict(data_config.generator_args),
        size=int(data_config.val_batch_size if split == "val" else data_config.size),
        seed=int(data_config.seed) + SEED_DISTANCE * SPLITS.index(split),
        style=data_config.prompt_style,
        chat=chat,
    )
