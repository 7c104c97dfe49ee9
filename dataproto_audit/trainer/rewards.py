"""Rewards: a user's function from a file, or a scorer by name; one finite score for each row.

verl's signature: ``compute_score(data_source, solution_str, ground_truth, extra_info=None)``
returns a number or a dict with ``score``. A function with plural parameters
(``data_sources, solution_strs, ground_truths, extra_infos``) is called once for the batch and
returns a list. ``extra_info`` also holds ``finish_reason``: ``stop`` or ``length``.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dataproto_audit.codes import RunError, UsageError
from dataproto_audit.protocol import DataProto
from dataproto_audit.trainer.prompts import object_array
from dataproto_audit.trainer.tokenizer import Tokenizer

_SHOWN = 120
_NUMBER_REMEDY = "Return one finite number, or a dict with one under 'score'."


def exact(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> float:
    """1 if the response is the ground truth, white space around it aside."""
    return float(solution_str.strip() == str(ground_truth).strip())


def exact_with_eos(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> float:
    """1 if the response is the ground truth, character by character, and ended by itself."""
    return float(extra_info["finish_reason"] == "stop" and solution_str == str(ground_truth))


def reasoning_gym(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> float:
    """The scorer of the generator that ``data_source`` names; partial credit is possible."""
    entry = {"answer": ground_truth, "metadata": extra_info.get("metadata", {})}
    return float(_gym_scorer(data_source)(solution_str.strip(), entry))


@functools.lru_cache(maxsize=64)
def _gym_scorer(name: str) -> Callable[[str, dict[str, Any]], float]:
    from dataproto_audit.trainer.sources import reasoning_gym as library

    library()
    from reasoning_gym.factory import DATASETS, get_score_answer_fn

    if name not in DATASETS:
        raise UsageError(
            "DPA851",
            f"the scorer reasoning_gym knows no data source {name!r}.",
            "Use exact, or a reward function of your own.",
        )
    scorer: Callable[[str, dict[str, Any]], float] = get_score_answer_fn(name)
    return scorer


BUILT_IN: dict[str, Callable[..., Any]] = {
    "compute_score": exact,  # the default name, without a path
    "exact": exact,
    "exact_with_eos": exact_with_eos,
    "reasoning_gym": reasoning_gym,
}


@dataclass
class Scorer:
    """Scores the responses of a batch. ``batched`` functions get all rows in one call."""

    function: Callable[..., Any]
    tokenizer: Tokenizer
    name: str
    batched: bool = False

    def __call__(self, batch: DataProto) -> DataProto:
        """``batch`` with the fields of :meth:`score` added (in place, and returned)."""
        return batch.union(self.score(batch))

    def score(self, batch: DataProto) -> DataProto:
        """Score each row.

        Returns rm_scores and token_level_scores f32[B,R], which hold a row's score at its last
        attended response token (column ``sum(response attention) - 1``), and the object arrays
        ``score`` and whatever else a dict result holds under strings.

        Raises RunError: DPA860 (the function raised; row, place and response are named), DPA861
        (not one finite number for each row), and UsageError from built-in scorers.
        """
        width = batch.batch["responses"].shape[1]
        length_B = batch.batch["attention_mask"][:, -width:].sum(-1)
        rows = [
            ids[:size]
            for ids, size in zip(batch.batch["responses"].tolist(), length_B.tolist(), strict=True)
        ]
        texts = self._texts(rows)
        returned = self._call(batch, texts, self._reasons(batch, rows))
        scores = [self._number(batch, row, value, texts[row]) for row, value in enumerate(returned)]
        rewards_BR = torch.zeros(len(batch), width)
        if len(batch):
            last_B = (length_B - 1).clamp(min=0)
            rewards_BR[torch.arange(len(batch)), last_B] = torch.tensor(scores)
        arrays = {"score": object_array(scores), **_extras(returned)}
        tensors = {"rm_scores": rewards_BR, "token_level_scores": rewards_BR.clone()}
        return DataProto.from_dict(tensors=tensors, non_tensors=arrays)

    def _texts(self, rows: Sequence[list[int]]) -> list[str]:
        """Response texts without special tokens; equal responses are decoded once."""
        keys = [tuple(ids) for ids in rows]
        distinct = list(dict.fromkeys(keys))
        text_of = dict(zip(distinct, self.tokenizer.decode_batch(distinct), strict=True))
        return [text_of[key] for key in keys]

    def _reasons(self, batch: DataProto, rows: Sequence[list[int]]) -> list[str]:
        """The engine's finish reasons; a batch from elsewhere is judged by its last token."""
        given = batch.non_tensor_batch.get("finish_reason")
        if given is not None:
            return [str(reason) for reason in given]
        stops = self.tokenizer.stop_ids
        return ["stop" if ids and ids[-1] in stops else "length" for ids in rows]

    def _call(self, batch: DataProto, texts: list[str], reasons: list[str]) -> list[Any]:
        arrays = batch.non_tensor_batch
        rows = len(batch)
        sources = arrays.get("data_source", [""] * rows)
        truths = [model["ground_truth"] for model in arrays["reward_model"]]
        extras = [
            {**(extra or {}), "finish_reason": reason}
            for extra, reason in zip(arrays.get("extra_info", [{}] * rows), reasons, strict=True)
        ]
        if self.batched:
            return self._call_batched(list(sources), texts, truths, extras)
        returned = []
        for row in range(rows):
            try:
                value = self.function(
                    data_source=sources[row],
                    solution_str=texts[row],
                    ground_truth=truths[row],
                    extra_info=extras[row],
                )
            except UsageError:
                raise
            except (Exception, SystemExit) as error:
                raise self._raised(error, _row_name(batch, row), texts[row]) from error
            returned.append(value)
        return returned

    def _call_batched(
        self, sources: list[Any], texts: list[str], truths: list[Any], extras: list[dict[str, Any]]
    ) -> list[Any]:
        try:
            returned = self.function(
                data_sources=sources, solution_strs=texts, ground_truths=truths, extra_infos=extras
            )
        except (Exception, SystemExit) as error:
            raise self._raised(error, f"a batch of {len(texts)} rows", texts[0]) from error
        try:
            listed = list(returned)
        except TypeError:
            listed = None
        if listed is None or isinstance(returned, (str, dict)) or len(listed) != len(texts):
            got = type(returned).__name__ if listed is None else f"{len(listed)} entries"
            raise RunError(
                "DPA861",
                f"{self.name} returned {got} for {len(texts)} rows.",
                "Return a list with one score for each row.",
            )
        return listed

    def _raised(self, error: BaseException, where: str, text: str) -> RunError:
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
        return RunError(
            "DPA860",
            f"{self.name} raised {type(error).__name__}: {error} (at {place}) on {where}, "
            f"response {_shown(text)}.",
            "Mend the function; it must take any response.",
        )

    def _number(self, batch: DataProto, row: int, value: Any, text: str) -> float:
        score = value
        if isinstance(value, Mapping):
            score = value.get("score")
        number = _as_number(score)
        if number is None or not math.isfinite(number):
            raise RunError(
                "DPA861",
                f"{self.name} returned {_shown(repr(value))} on {_row_name(batch, row)}, response "
                f"{_shown(text)}.",
                _NUMBER_REMEDY,
            )
        return number


def open_scorer(reward_config: Any, tokenizer: Tokenizer) -> Scorer:
    """The scorer that the ``reward`` section names.

    ``custom_reward_function.path`` null takes a built-in one by ``name``; the default name is
    ``exact``. UsageError DPA851 if the file or the function is not there or cannot be imported.
    """
    section = reward_config.custom_reward_function
    name = str(section.name)
    if not section.path:
        if name not in BUILT_IN:
            raise UsageError(
                "DPA851",
                f"reward.custom_reward_function.name={name!r} is no built-in scorer.",
                f"Choose one of {sorted(BUILT_IN)}, or give the path of a Python file.",
            )
        return Scorer(BUILT_IN[name], tokenizer, name)
    function = _from_file(Path(str(section.path)), name)
    parameters = set(inspect.signature(function).parameters)
    label = f"{Path(str(section.path)).name}:{name}"
    return Scorer(function, tokenizer, label, batched="solution_strs" in parameters)


def _from_file(path: Path, name: str) -> Callable[..., Any]:
    """Run the file as a module and take the function; its code runs in this process."""
    import importlib.util

    if not path.is_file():
        raise UsageError("DPA851", f"{path}: no such reward file.", "Check the path.")
    spec = importlib.util.spec_from_file_location(f"reward_function_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError("DPA851", f"{path}: not a Python file.", "Give a .py file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise UsageError(
            "DPA851",
            f"{path}: cannot be imported ({type(error).__name__}: {error}).",
            "Mend the file.",
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        there = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise UsageError(
            "DPA851",
            f"{path}: no function {name!r} in it (there are: {', '.join(there) or 'none'}).",
            "Set reward.custom_reward_function.name.",
        )
    found: Callable[..., Any] = function
    return found


def _as_number(value: Any) -> float | None:
    """Float of a real number (Python's, numpy's, a tensor of one element), else None."""
    if value is None or isinstance(value, (str, bytes, complex)):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _extras(returned: Sequence[Any]) -> dict[str, Any]:
    """Further columns of dict results, None where a row lacks one."""
    keys: dict[str, None] = {}
    for value in returned:
        if isinstance(value, Mapping):
            keys |= {key: None for key in value if isinstance(key, str) and key != "score"}
    return {
        key: object_array([v.get(key) if isinstance(v, Mapping) else None for v in returned])
        for key in keys
    }


def _row_name(batch: DataProto, row: int) -> str:
    uids = batch.non_tensor_batch.get("uid")
    return f"row {row}" + (f" (uid {uids[row]})" if uids is not None else "")


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")
