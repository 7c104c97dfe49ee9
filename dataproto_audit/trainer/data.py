"""The data of a run as the configuration names it: prompts by split, and the supervised warm-up."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dataproto_audit.codes import UsageError
from dataproto_audit.protocol import DataProto
from dataproto_audit.trainer.prompts import LengthRule, PromptData
from dataproto_audit.trainer.rollout.rows import positions
from dataproto_audit.trainer.sources import open_source
from dataproto_audit.trainer.tokenizer import Tokenizer


def open_data(
    data_config: Any, tokenizer: Tokenizer, *, split: str = "train", batch_size: int | None = None
) -> PromptData:
    """Prompts of a split (``train``, ``val``, ``warmup``) as the ``data`` section says.

    The batch size is ``train_batch_size`` or ``val_batch_size`` (at most the rows there are)
    unless given. Raises UsageError: DPA851 (nothing configured, unknown generator), DPA852 (no
    chat template), DPA853 (prompt too long), DPA857 (file), DPA858 (reasoning-gym missing).
    """
    source = open_source(data_config, split=split)
    rule = LengthRule(
        limit=int(data_config.max_prompt_length),
        filter=bool(data_config.filter_overlong_prompts),
        truncation=str(data_config.truncation),
    )
    size = int(data_config.val_batch_size if split == "val" else data_config.train_batch_size)
    return PromptData(
        source,
        tokenizer,
        rule,
        batch_size=batch_size or (min(size, len(source)) if split == "val" else size),
        seed=int(data_config.seed),
        shuffle=bool(data_config.shuffle) and split != "val",
    )


def warmup_batch(
    data_config: Any, tokenizer: Tokenizer, *, steps: int, batch_size: int
) -> DataProto:
    """Supervised batches before RL, all steps as one batch of ``steps * batch_size`` rows.

    A model from random weights earns no reward, so nothing can be reinforced; a few steps on
    prompt, answer and end token give it the format. Fields as in the loop: prompts, responses,
    input_ids, attention_mask, position_ids and ``response_mask``, which is the loss mask (answer
    and end token). Raises UsageError DPA853 for an answer that does not fit into
    ``data.max_response_length`` with its end token.
    """
    data = open_data(data_config, tokenizer, split="warmup", batch_size=batch_size)
    width, max_response_length = data.rule.limit, int(data_config.max_response_length)
    rows = steps * batch_size
    prompts_BP = np.full((rows, width), tokenizer.pad_id, np.int64)
    responses_BR = np.full((rows, max_response_length), tokenizer.pad_id, np.int64)
    mask_BP, mask_BR = np.zeros_like(prompts_BP), np.zeros_like(responses_BR)
    row = 0
    for step in range(1, steps + 1):
        batch = data.batch(step)
        answers = [str(item["ground_truth"]) for item in batch.non_tensor_batch["reward_model"]]
        encoded = tokenizer.encode_batch(answers, special=False)
        for ids, answer in zip(batch.non_tensor_batch["prompt_ids"], encoded, strict=True):
            target = [*answer, tokenizer.eos_id]
            if len(target) > max_response_length:
                raise UsageError(
                    "DPA853",
                    f"an answer of {len(answer)} tokens and the end token do not fit into "
                    f"data.max_response_length={max_response_length}.",
                    "Raise the limit, or set warmup.steps=0.",
                )
            prompts_BP[row, width - len(ids) :] = ids
            mask_BP[row, width - len(ids) :] = 1
            responses_BR[row, : len(target)] = target
            mask_BR[row, : len(target)] = 1
            row += 1
    mask = np.concatenate([mask_BP, mask_BR], axis=1)
    arrays = {
        "prompts": prompts_BP,
        "responses": responses_BR,
        "response_mask": mask_BR,
        "input_ids": np.concatenate([prompts_BP, responses_BR], axis=1),
        "attention_mask": mask,
        "position_ids": positions(mask),
    }
    return DataProto.from_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
