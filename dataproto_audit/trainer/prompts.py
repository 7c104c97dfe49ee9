"""Batches of prompts: tokenised, limited in length, shuffled, the same ones for the same step.

A batch is a DataProto without tensors; its rows are the object arrays
``raw_prompt``, ``prompt_ids`` (lists of token ids), ``data_source``, ``reward_model``,
``extra_info`` and ``index``. ``uid`` is not drawn here: that is a step of the loop.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataproto_audit.codes import UsageError
from dataproto_audit.protocol import DataProto
from dataproto_audit.trainer.sources import GeneratorSource, Row, Source
from dataproto_audit.trainer.tokenizer import Tokenizer

#: Rows of a generator that are tokenised before the run starts, to fail early on long prompts.
_LOOK_AHEAD = 64
#: Rounds of drawing replacements for over-long generated prompts.
_TRIES = 100


@dataclass(frozen=True)
class LengthRule:
    """What becomes of prompts longer than ``limit`` tokens.

    ``filter`` leaves them out (and counts them); otherwise ``truncation`` is ``error``, ``left``
    (the end is kept) or ``right`` (the beginning is kept).
    """

    limit: int
    filter: bool = False
    truncation: str = "error"


@dataclass(frozen=True)
class Prompt:
    """A row of the source with its token ids, after the length rule."""

    index: int
    row: Row
    ids: list[int]


class PromptData:
    """Batches of prompts over a source, epoch by epoch; batch k is a function of k alone.

    Each epoch is a permutation drawn from (seed, epoch), so a resumed run gets the batches that
    the first one would have had. Over-long prompts of files are left out before the epochs are
    drawn; those of a generator are replaced by rows drawn from (seed, batch).
    """

    def __init__(
        self, source: Source, tokenizer: Tokenizer, rule: LengthRule, *, batch_size: int,
        seed: int = 0, shuffle: bool = True,
    ) -> None:  # fmt: skip
        self.source = source
        self.tokenizer = tokenizer
        self.rule = rule
        self.batch_size = batch_size
        self.overlong = 0
        """Prompts left out because they were too long: of the whole file, or as met so far."""
        self._seed = seed
        self._shuffle = shuffle
        self._generated = isinstance(source, GeneratorSource)
        self._epoch: tuple[int, NDArray[np.int64]] | None = None
        self._rows = self._look_ahead()
        if len(self._rows) < batch_size:
            raise UsageError(
                "DPA857",
                f"{source.name} has {len(self._rows)} usable rows, fewer than a batch of "
                f"{batch_size}.",
                "Lower the batch size or give more data.",
            )

    def __len__(self) -> int:
        """Usable rows of the source."""
        return len(self._rows)

    def batch(self, step: int) -> DataProto:
        """The batch of training step ``step`` (from 1; 0 is taken as 1)."""
        begin = max(step - 1, 0) * self.batch_size
        wanted = [self._at(begin + k) for k in range(self.batch_size)]
        prompts = self.tokenize(wanted)
        spare = np.random.default_rng([self._seed, begin, 1])
        for _ in range(_TRIES):
            missing = self.batch_size - len(prompts)
            if not missing:
                return to_batch(prompts)
            drawn = spare.choice(self._rows, missing)
            prompts += self.tokenize([int(index) for index in drawn])
        raise _all_too_long(self.source, self.rule)

    def one_pass(self) -> Iterator[DataProto]:
        """Every row once, in order, in batches; the last may be short."""
        prompts: list[Prompt] = []
        for begin in range(0, len(self._rows), self.batch_size):
            prompts += self.tokenize(self._rows[begin : begin + self.batch_size].tolist())
            while len(prompts) >= self.batch_size:
                yield to_batch(prompts[: self.batch_size])
                prompts = prompts[self.batch_size :]
        if prompts:
            yield to_batch(prompts)

    def tokenize(self, indices: Sequence[int]) -> list[Prompt]:
        """Prompts of these rows after the length rule; filtered ones are missing and counted."""
        rows = [self.source.row(index) for index in indices]
        encoded = self._encode(rows)
        kept: list[Prompt] = []
        for index, row, ids in zip(indices, rows, encoded, strict=True):
            self._check_ids(index, row, ids)
            if len(ids) > self.rule.limit:
                if self.rule.filter:
                    self.overlong += 1
                    continue
                ids = self._shortened(index, ids)
            kept.append(Prompt(index, row, ids))
        return kept

    def _encode(self, rows: Sequence[Row]) -> list[list[int]]:
        texts = [row.raw_prompt for row in rows if isinstance(row.raw_prompt, str)]
        if len(texts) == len(rows):
            return self.tokenizer.encode_batch(texts)
        return [
            self.tokenizer.encode(row.raw_prompt)
            if isinstance(row.raw_prompt, str)
            else self.tokenizer.encode_chat(row.raw_prompt)
            for row in rows
        ]

    def _check_ids(self, index: int, row: Row, ids: list[int]) -> None:
        if not ids:
            raise UsageError(
                "DPA857", f"{self.source.name}, row {index}: the prompt has no tokens.", "Mend it."
            )
        if self.tokenizer.charset is not None and self.tokenizer.unk_id in ids:
            raise UsageError(
                "DPA857",
                f"{self.source.name}, row {index}: the tiny model's tokenizer does not know "
                f"{self.tokenizer.unknown_in(str(row.raw_prompt))}.",
                "Use a model folder (model.path), or prompts of printable ASCII.",
            )

    def _shortened(self, index: int, ids: list[int]) -> list[int]:
        if self.rule.truncation == "left":
            return ids[-self.rule.limit :]
        if self.rule.truncation == "right":
            return ids[: self.rule.limit]
        raise UsageError(
            "DPA853",
            f"{self.source.name}, row {index}: the prompt has {len(ids)} tokens, more than "
            f"data.max_prompt_length={self.rule.limit}.",
            "Set data.filter_overlong_prompts=true, data.truncation=left or right, or raise the "
            "limit.",
        )

    def _at(self, position: int) -> int:
        """Row index at a position of the endless stream of epochs."""
        epoch, offset = divmod(position, len(self._rows))
        if self._epoch is None or self._epoch[0] != epoch:
            order = self._rows
            if self._shuffle:
                order = np.random.default_rng([self._seed, epoch]).permutation(order)
            self._epoch = (epoch, order)
        return int(self._epoch[1][offset])

    def _look_ahead(self) -> NDArray[np.int64]:
        """Usable row indices. Files are tokenised whole, generators in part, to fail early."""
        size = len(self.source)
        looked = range(min(size, _LOOK_AHEAD) if self._generated else size)
        kept = [prompt.index for prompt in self.tokenize(looked)]
        if not kept and size:
            raise _all_too_long(self.source, self.rule)
        if self._generated:
            self.overlong = 0
            return np.arange(size)
        return np.array(kept, np.int64)

    def identity(self) -> dict[str, Any]:
        """What a checkpoint remembers of the data, for :meth:`check_identity`."""
        first = self.source.row(0)
        text = json.dumps([first.raw_prompt, first.reward_model], sort_keys=True, default=str)
        return {
            "name": self.source.name,
            "rows": len(self),
            "batch_size": self.batch_size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "first_row": hashlib.sha256(text.encode()).hexdigest()[:16],
        }

    def check_identity(self, saved: Mapping[str, Any]) -> None:
        """UsageError DPA804 if ``saved`` was taken over other data: batches would not go on."""
        mine = self.identity()
        wrong = sorted(key for key in mine if saved.get(key) != mine[key])
        if wrong:
            raise UsageError(
                "DPA804",
                f"the checkpoint was made with other data (differs in: {', '.join(wrong)}).",
                "Resume with the data, batch size, seed and shuffling that the run started with.",
            )


def to_batch(prompts: Sequence[Prompt]) -> DataProto:
    """Rows of a batch; see the top of this module for its fields."""
    columns: dict[str, list[Any]] = {
        "raw_prompt": [prompt.row.raw_prompt for prompt in prompts],
        "prompt_ids": [prompt.ids for prompt in prompts],
        "data_source": [prompt.row.data_source for prompt in prompts],
        "reward_model": [prompt.row.reward_model for prompt in prompts],
        "extra_info": [prompt.row.extra_info for prompt in prompts],
        "index": [prompt.index for prompt in prompts],
    }
    return DataProto(
        non_tensor_batch={name: object_array(values) for name, values in columns.items()}
    )


def object_array(values: Sequence[Any]) -> NDArray[np.object_]:
    """object[len(values)], whatever the values are (numpy would stack lists of equal length)."""
    array = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        array[row] = value
    return array


def _all_too_long(source: Source, rule: LengthRule) -> UsageError:
    return UsageError(
        "DPA853",
        f"{source.name}: every prompt is longer than data.max_prompt_length={rule.limit}.",
        "Raise data.max_prompt_length.",
    )
