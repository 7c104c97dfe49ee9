"""Every field of the loop, declared once: axes and kind of number, meaning, producer, convention.

Axis names: ``rows`` (prompts x n once expanded), ``prompt`` and ``response`` (padded widths) and
``prompt+response``. Log-prob convention, everywhere: column ``t`` of a response field belongs to
``responses[:, t]``, so ``old_log_probs[:, t]`` is log p(responses[:, t] | everything before it).
"""

import typing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from jaxtyping import Bool, Float, Integer
from torch import Tensor

Kind = Literal["tensor", "object", "meta"]


@dataclass(frozen=True)
class Field:
    """One declared field. ``annotation`` is a jaxtyping type, or a union of such, for tensors."""

    name: str
    annotation: Any
    producer: str
    meaning: str
    kind: Kind = "tensor"

    @cached_property
    def forms(self) -> tuple[Any, ...]:
        """The jaxtyping types of which a tensor must be one."""
        return typing.get_args(self.annotation) or (self.annotation,)

    @cached_property
    def axes(self) -> str:
        """The declared axes: ``rows response``; ``rows`` for non-tensor fields."""
        if self.kind == "meta":
            return ""
        return "rows" if self.annotation is None else str(self.forms[0].dim_str)

    @cached_property
    def number(self) -> str:
        """The declared kind of number: ``integer``, ``float``, ``object``..."""
        if self.annotation is None:
            return self.kind
        kinds = (str(form.__name__).split("[")[0].lower() for form in self.forms)
        return " or ".join(dict.fromkeys(kinds))


FIELDS: dict[str, Field] = {}


def declare(
    name: str, annotation: Any, producer: str, meaning: str, *, kind: Kind | None = None
) -> Field:
    """Declare a field; users declare their own the same way. A name is declared once."""
    if name in FIELDS:
        raise ValueError(f"field {name!r} is declared already: {FIELDS[name].meaning}")
    chosen: Kind = kind or ("object" if annotation is None else "tensor")
    FIELDS[name] = field = Field(name, annotation, producer, meaning, chosen)
    return field


PromptIds = Integer[Tensor, "rows prompt"]
ResponseIds = Integer[Tensor, "rows response"]
ResponseMask = Integer[Tensor, "rows response"] | Bool[Tensor, "rows response"]
FullIds = Integer[Tensor, "rows prompt+response"]
FullMask = Integer[Tensor, "rows prompt+response"] | Bool[Tensor, "rows prompt+response"]
# Multimodal models count positions on several axes, [rows, axes, prompt+response].
Positions = FullIds | Integer[Tensor, "rows axes prompt+response"]
Routing = Integer[Tensor, "rows prompt+response layers chosen"]
PerToken = Float[Tensor, "rows response"]

# -- prompts ---------------------------------------------------------------------------------------
declare("uid", None, "prompts", "one id per prompt, drawn before the repeat by n")
declare("raw_prompt", None, "prompts", "the prompt as chat messages or text")
declare("prompt_ids", None, "prompts", "the prompt's token ids, without padding")
declare("data_source", None, "prompts", "name of the data set, selects the reward function")
declare("reward_model", None, "prompts", "ground truth and style of the reward")
declare("extra_info", None, "prompts", "anything the data set adds")
declare("index", None, "prompts", "row of the data set")
# -- rollout ---------------------------------------------------------------------------------------
declare("prompts", PromptIds, "rollout", "prompt ids, padded left")
declare("responses", ResponseIds, "rollout", "sampled ids, padded right")
declare("response_mask", ResponseMask, "rollout", "1 on tokens to train on")
declare("input_ids", FullIds, "rollout", "prompt followed by response")
declare("attention_mask", FullMask, "rollout", "1 on real tokens, 0 on padding")
declare("position_ids", Positions, "rollout", "clip(cumsum(attention_mask) - 1, 0)")
declare(
    "rollout_log_probs",
    PerToken,
    "rollout",
    "engine's log-prob of each sampled token at the sampling temperature; 0 off the mask",
)
declare("loss_mask", ResponseMask, "rollout", "the response mask before any correction")
declare("tool_mask", ResponseMask, "rollout", "1 on tokens that a model, not a tool, wrote")
declare("weight_version", None, "rollout", "version of the weights that sampled the row")
declare("routed_experts", Routing, "rollout", "experts that the engine chose for each token")
declare("mm_token_type_ids", FullIds, "rollout", "1 on image ids, 2 on video ids")
declare("image_grid_thw", None, "prompts", "patches of each image in time, height and width")
declare("finish_reason", None, "rollout", "'stop' after a stop token, 'length' at the limit")
# -- dispatch --------------------------------------------------------------------------------------
declare("is_pad", None, "dispatch", "true on rows that only fill the batch up")
declare("is_padding", None, "dispatch", "the same under another name")
# -- reward ----------------------------------------------------------------------------------------
declare("score", None, "reward", "scalar score of the row")
declare("rm_scores", PerToken, "reward", "token-level scores as the reward stage returns them")
declare("token_level_scores", PerToken, "reward", "score on the last token of the response")
# -- log-probs and values --------------------------------------------------------------------------
declare("old_log_probs", PerToken, "old_log_prob", "log-probs of the policy before the update")
declare("entropys", PerToken, "old_log_prob", "entropy of the next-token distribution")
declare("ref_log_prob", PerToken, "ref_log_prob", "log-probs of the frozen reference model")
declare("values", PerToken, "values", "the critic's value before each token")
# -- advantage -------------------------------------------------------------------------------------
declare("token_level_rewards", PerToken, "advantage", "scores after KL in reward, if any")
declare("advantages", PerToken, "advantage", "advantage of each token")
declare("returns", PerToken, "advantage", "return of each token")
declare("rollout_is_weights", PerToken, "advantage", "importance weights against the rollout")
# -- update ----------------------------------------------------------------------------------------
declare(
    "update_log_probs",
    PerToken,
    "update_actor",
    "log-probs just before the optimizer step of the row's mini-batch",
)
declare("update_entropys", PerToken, "update_actor", "entropies of the same forward pass")
declare("mini_batch", Integer[Tensor, "rows"], "update_actor", "mini-batch the row was trained in")
declare(
    "update_values",
    PerToken,
    "update_critic",
    "values just before the optimizer step of the row's mini-batch",
)
declare(
    "value_mini_batch",
    Integer[Tensor, "rows"],
    "update_critic",
    "mini-batch the critic was trained on the row in",
)
# -- meta ------------------------------------------------------------------------------------------
declare("temperature", None, "prompts", "sampling temperature of the run", kind="meta")
declare("sampling", None, "rollout", "settings the engine really sampled with", kind="meta")
declare("losses", None, "update_actor", "loss terms and normaliser per mini-batch", kind="meta")
declare("ranks", None, "update_actor", "rows, tokens and micro-batches per rank", kind="meta")
declare("trainer_checksum", None, "sync_weights", "per-tensor checksums, trainer", kind="meta")
declare("engine_checksum", None, "sync_weights", "per-tensor checksums, engine", kind="meta")
