"""Every stage of the loop, declared once, in the order of the loop.

A stage says what it ``reads``, ``adds`` (always), ``may_add``, ``changes`` and ``drops``, and how
its rows relate to the rows before it. Everything else is kept: equal, row key by row key. The
table of ``dataproto-audit fields`` is printed from these classes, and a test compares it with the
evolution measured in a run.
"""

from typing import Any, ClassVar

from dataproto_audit.codes import UsageError
from dataproto_audit.contracts.dims import EXPAND_N, PERMUTE, SAME, Rows

STAGES: dict[str, type["Stage"]] = {}


class Stage:
    """Base of stage declarations. Subclasses register themselves under ``name``."""

    name: ClassVar[str] = ""
    rows: ClassVar[Rows] = SAME
    reads: ClassVar[tuple[str, ...]] = ()
    adds: ClassVar[tuple[str, ...]] = ()
    may_add: ClassVar[tuple[str, ...]] = ()
    changes: ClassVar[tuple[str, ...]] = ()
    drops: ClassVar[tuple[str, ...]] = ()
    fresh: ClassVar[bool] = False
    """True where the batch after the stage is a new one, which need not carry earlier fields."""
    own_input: ClassVar[bool] = False
    """True where the batch before the stage is none of the step: nothing is compared with it."""
    if_configured: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Fields that the stage changes only where the named setting is on."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        STAGES[cls.name] = cls

    @classmethod
    def changeable(cls, settings: Any) -> frozenset[str]:
        """Fields that the stage may change or drop under ``settings``."""
        optional = (
            names for setting, names in cls.if_configured.items() if getattr(settings, setting)
        )
        return frozenset((*cls.changes, *cls.drops)).union(*optional)

    @classmethod
    def unsettled(cls, settings: Any) -> frozenset[str]:
        """Fields that the stage may change or not: nobody told the setting."""
        unknown = (n for s, n in cls.if_configured.items() if getattr(settings, s) is None)
        return frozenset().union(*unknown)

    @classmethod
    def declared(cls) -> tuple[str, ...]:
        """All fields the stage names."""
        return (*cls.reads, *cls.adds, *cls.may_add, *cls.changes)


PROMPT_SIDE = (
    "uid", "raw_prompt", "prompt_ids", "data_source", "reward_model", "extra_info", "index",
)  # fmt: skip
TOKENS = ("prompts", "responses", "input_ids", "attention_mask", "position_ids")


class Prompts(Stage):
    """Data loader, and one uid per prompt."""

    name = "prompts"
    adds = ("uid", "raw_prompt")
    may_add = (*PROMPT_SIDE[2:], "image_grid_thw", "temperature")
    fresh = True
    own_input = True


class Rollout(Stage):
    """Repeat by n, then sample one response per row."""

    name = "rollout"
    rows = EXPAND_N
    reads = ("uid",)
    adds = (*TOKENS, "response_mask")
    may_add = (
        "uid", "rollout_log_probs", "finish_reason", "sampling", "loss_mask", "tool_mask",
        "weight_version", "routed_experts", "mm_token_type_ids", "image_grid_thw",
    )  # fmt: skip
    fresh = True


class Union(Stage):
    """The prompt side, repeated by n, merged with the rollout's output row by row."""

    name = "union"
    reads = ("responses",)
    adds = ("uid",)
    may_add = PROMPT_SIDE[1:]


class Balance(Stage):
    """Rows reordered so that contiguous chunks hold about equally many tokens."""

    name = "balance"
    rows = PERMUTE
    reads = ("attention_mask",)


class Dispatch(Stage):
    """Rows cut over ranks and micro-batches; a worker gets its own rows and nothing else."""

    name = "dispatch"
    reads = ("attention_mask",)
    may_add = ("is_pad", "is_padding")


class Reward(Stage):
    """One score per response, written on its last token."""

    name = "reward"
    reads = ("prompts", "responses", "attention_mask")
    adds = ("token_level_scores",)
    may_add = ("rm_scores", "score")


class OldLogProb(Stage):
    """The policy's own log-probs of the sampled tokens, before any update."""

    name = "old_log_prob"
    reads = ("responses", "input_ids", "attention_mask", "position_ids")
    adds = ("old_log_probs",)
    may_add = ("entropys",)


class RefLogProb(Stage):
    """The frozen reference model's log-probs of the same tokens."""

    name = "ref_log_prob"
    reads = ("responses", "input_ids", "attention_mask", "position_ids")
    adds = ("ref_log_prob",)


class Values(Stage):
    """The critic's estimate of the return, before each token of the response."""

    name = "values"
    reads = ("responses", "input_ids", "attention_mask", "position_ids")
    adds = ("values",)


class KLReward(Stage):
    """A KL penalty taken off the token-level scores."""

    name = "kl_reward"
    reads = ("token_level_scores", "old_log_probs", "ref_log_prob", "response_mask")
    adds = ("token_level_rewards",)


class Advantage(Stage):
    """Scores to rewards to advantages, on the driver. Rollout correction happens here, too."""

    name = "advantage"
    reads = ("token_level_scores", "response_mask", "uid")
    adds = ("token_level_rewards", "advantages", "returns")
    may_add = ("rollout_is_weights",)
    if_configured: ClassVar = {"rejection": ("response_mask",)}


class UpdateCritic(Stage):
    """Mini-batch steps on the critic. What it adds is the evidence of those steps."""

    name = "update_critic"
    reads = (
        "responses", "response_mask", "input_ids", "attention_mask", "position_ids",
        "values", "returns",
    )  # fmt: skip
    may_add = ("update_values", "value_mini_batch", "losses", "ranks")


class UpdateActor(Stage):
    """Mini-batch steps on the policy. What it adds is the evidence of those steps."""

    name = "update_actor"
    reads = (
        "responses", "response_mask", "input_ids", "attention_mask", "position_ids",
        "old_log_probs", "advantages",
    )  # fmt: skip
    may_add = ("update_log_probs", "update_entropys", "mini_batch", "losses", "ranks")


class SyncWeights(Stage):
    """Trainer weights to the rollout engine. It carries no rows."""

    name = "sync_weights"
    may_add = ("trainer_checksum", "engine_checksum")
    fresh = True
    own_input = True


class Validation(Stage):
    """Greedy responses on held-out prompts, scored."""

    name = "validation"
    adds = (*TOKENS, "response_mask", "token_level_scores")
    may_add = ("rollout_log_probs", "finish_reason", "sampling", "rm_scores", "score", *PROMPT_SIDE)
    fresh = True
    own_input = True


def declared(stage: str) -> type[Stage]:
    """The declaration of a stage. Raises :class:`UsageError` for one that nothing declares."""
    if stage not in STAGES:
        raise UsageError(
            "DPA851", f"unknown stage {stage!r}.", f"Declared are {', '.join(STAGES)}."
        )
    return STAGES[stage]
