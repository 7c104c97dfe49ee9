"""How other frameworks name and align what we call prompts, masks, log-probs and rewards.

One entry a file format, read from its writer's source. ``at`` says which token value ``t`` of a
list belongs to, so that a shift is declared and never guessed:

* ``response``: token ``t`` of the response
* ``sequence``: token ``t`` of prompt and response together
* ``next``: token ``t + 1`` of prompt and response together

Where a file does not say where its prompt ends (``whole``), the first token stands for the prompt
and all others for the response: the mask then says what was trained, as it does in the file.
What no entry names stays under its own name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dataproto_audit.dump.readers.saved import When

Alignment = Literal["response", "sequence", "next"]


@dataclass(frozen=True)
class Ids:
    """Where the token ids are: ``split`` (two lists), ``length`` (one and a response length) or
    ``whole`` (one, and its length without padding or None)."""

    how: Literal["split", "length", "whole"]
    tokens: str
    other: str | None


@dataclass(frozen=True)
class Tokens:
    """A list of one value a token. ``zero_is_missing``: all zero means that nobody computed it."""

    source: str
    target: str
    at: Alignment
    floats: bool = True
    zero_is_missing: bool = False


@dataclass(frozen=True)
class Framework:
    """One file format. A row is recognised by the keys in ``needs``."""

    name: str
    needs: frozenset[str]
    stage: str
    when: When
    ids: Ids | None = None
    tokens: tuple[Tokens, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    step: str | None = None
    notes: tuple[str, ...] = ()


WHOLE = "prompt and response are not told apart: the first token stands for the prompt"
SHIFTED = "value t is about token t+1 of the sequence, so columns move by one"

FRAMEWORKS: tuple[Framework, ...] = (
    Framework(
        "verl", frozenset({"input", "output", "score", "step"}), "reward", "after", step="step",
        notes=("text without ids; the uid of a V1 dump is the row's store key",),
    ),
    Framework(
        "areal", frozenset({"task_id", "sample_idx", "tail_version", "completion"}),
        "reward", "after",
        renamed={"task_id": "uid", "prompt": "raw_prompt", "reward": "score"},
        notes=("text without ids", "head_version is always -1: it tells no staleness"),
    ),
    Framework(
        "nemo_rl", frozenset({"token_ids", "token_loss_mask", "input_lengths"}),
        "update_actor", "before",
        ids=Ids("whole", "token_ids", "input_lengths"),
        tokens=(
            Tokens("token_loss_mask", "response_mask", "sequence", floats=False),
            Tokens("generation_logprobs", "rollout_log_probs", "sequence"),
            Tokens("prev_logprobs", "old_log_probs", "sequence", zero_is_missing=True),
            Tokens("reference_policy_logprobs", "ref_log_prob", "sequence", zero_is_missing=True),
            Tokens("advantages", "advantages", "sequence"),
        ),
        renamed={"rewards": "score"},
        notes=(WHOLE, "advantages fill prompt and padding, too"),
    ),
    Framework(
        "open_instruct", frozenset({"prompt_tokens", "response_tokens", "reward"}),
        "advantage", "after",
        ids=Ids("split", "prompt_tokens", "response_tokens"),
        tokens=(Tokens("logprobs", "rollout_log_probs", "response"),),
        renamed={"prompt_idx": "uid", "reward": "score"}, step="step",
        notes=("no mask in the file", "uid is prompt_idx, the position of the prompt in its step"),
    ),
    Framework(
        "openrlhf", frozenset({"sequences", "attention_mask", "action_mask"}),
        "advantage", "after",
        ids=Ids("whole", "sequences", "attended"),
        tokens=(
            Tokens("action_mask", "response_mask", "next", floats=False),
            Tokens("action_log_probs", "old_log_probs", "next"),
            Tokens("base_action_log_probs", "ref_log_prob", "next"),
            Tokens("rollout_log_probs", "rollout_log_probs", "next"),
            Tokens("values", "values", "next"),
            Tokens("advantages", "advantages", "next"),
            Tokens("returns", "returns", "next"),
        ),
        renamed={"prompts": "raw_prompt", "rewards": "score", "attention_mask": "sequence_mask"},
        notes=(WHOLE, SHIFTED, "advantages and returns run over the prompt, too"),
    ),
    Framework(
        "prime_rl", frozenset({"nodes", "episode"}), "advantage", "after",
        ids=Ids("split", "prompt_tokens", "response_tokens"),
        tokens=(
            Tokens("mask", "response_mask", "response", floats=False),
            Tokens("logprobs", "rollout_log_probs", "response"),
            Tokens("trainer_logprobs", "old_log_probs", "response"),
            Tokens("reference_logprobs", "ref_log_prob", "response"),
            Tokens("entropies", "entropys", "response"),
            Tokens("advantages", "advantages", "response"),
        ),
        notes=(
            "values are rounded to 4 decimals",
            "lists of trained tokens are spread over the mask, 0 elsewhere",
            "score is the weighted sum of the rewards",
        ),
    ),
    Framework(
        "prime_rl", frozenset({"token_ids", "loss_mask", "inference_logprobs"}),
        "update_actor", "after",
        ids=Ids("whole", "token_ids", None),
        tokens=(
            Tokens("loss_mask", "response_mask", "sequence", floats=False),
            Tokens("inference_logprobs", "rollout_log_probs", "sequence"),
            Tokens("trainer_logprobs", "old_log_probs", "sequence"),
            Tokens("advantages", "advantages", "sequence"),
            Tokens("entropy", "entropys", "sequence"),
        ),
        renamed={"position_ids": "sequence_positions"}, step="step",
        notes=(WHOLE, "off the mask inference_logprobs is 0 and trainer_logprobs is not"),
    ),
    Framework(
        "slime", frozenset({"group_index", "tokens", "response_length"}), "reward", "after",
        ids=Ids("length", "tokens", "response_length"),
        tokens=(
            Tokens("loss_mask", "response_mask", "response", floats=False),
            Tokens("rollout_log_probs", "rollout_log_probs", "response"),
        ),
        renamed={"group_index": "uid", "prompt": "raw_prompt", "reward": "score"},
        notes=("rollout_log_probs is 0 on tokens of tools",),
    ),
    Framework(
        "slime", frozenset({"tokens", "response_lengths", "loss_masks"}),
        "update_actor", "before",
        ids=Ids("length", "tokens", "response_lengths"),
        tokens=(
            Tokens("loss_masks", "response_mask", "response", floats=False),
            Tokens("rollout_log_probs", "rollout_log_probs", "response"),
            Tokens("log_probs", "old_log_probs", "response"),
            Tokens("ref_log_probs", "ref_log_prob", "response"),
            Tokens("advantages", "advantages", "response"),
            Tokens("returns", "returns", "response"),
        ),
        renamed={"raw_reward": "score"},
        notes=("rewards are normalised over the group already; score is the raw reward",),
    ),
    Framework(
        "trl", frozenset({"prompt", "completion", "advantage", "step"}), "advantage", "after",
        renamed={"prompt": "raw_prompt"}, step="step",
        notes=(
            "text without ids; one column for each reward function, whose weights are not kept",
            "the same completions may be written again under the next step",
        ),
    ),
)  # fmt: skip
