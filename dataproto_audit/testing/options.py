"""What a simulated healthy step looks like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dataproto_audit.probes.context import Settings
from dataproto_audit.testing.toy_policy import PAD, STOP


@dataclass(frozen=True)
class Options:
    """What the step looks like. ``dtype`` is the precision of trainer and engine.

    ``one_token`` rows stop at once, ``truncated`` rows never stop; both count rows from the first
    on. ``multi_turn`` puts tool tokens, which are not trained on, into every other row.
    ``reference`` runs the reference model, with a KL loss unless the KL is in the reward;
    ``critic`` makes it GAE with values.
    """

    prompts: int = 4
    n: int = 4
    prompt_width: int = 6
    response_width: int = 4
    seed: int = 0
    step: int = 1
    ranks: int = 2
    mini_batches: int = 1
    micro_rows: int = 3
    max_token_len: int | None = None
    """Micro-batches are cut by tokens instead of by rows."""
    balanced: bool = True
    one_token: int = 1
    truncated: int = 1
    aborted: int = 0
    """Rows from the last on whose response is empty."""
    counts: tuple[int, ...] = ()
    """Rows of each prompt where they differ; ``n`` is unknown then."""
    pad_rows: int = 0
    """Rows that only fill the batch up: own uid, nothing trained on; ``n`` is unknown then."""
    duplicate_prompts: bool = False
    equal_groups: bool = False
    reference: bool = True
    kl_in_reward: bool = False
    critic: bool = False
    entropy: bool = False
    multi_turn: bool = False
    bypass: bool = False
    """Old log-probs are a copy of the engine's."""
    correction: bool = False
    """Rollout correction: importance weights, and some rows and tokens rejected."""
    rejected: bool = False
    """Some rows rejected whole, without weights; ``loss_mask`` is the mask before."""
    channels: int = 0
    """Channels of the position ids, as multimodal models have them; 0 is none."""
    pad_garbage: bool = False
    """The trainer leaves a log-prob on the first padding slot, as packed passes do."""
    images: bool = False
    """Two image pieces in each prompt, positions on four axes, token types."""
    recorded: bool = False
    """Everything that a careful loop tells: the dispatch, weight versions, a second mask, metrics
    of the batch, the sizes that rows are cut by."""
    cp_size: int = 2
    """Ranks that each sequence is split over, where it is recorded."""
    engine_gap: float = 0.0
    """Mean |old - rollout| that the engine's kernels make, in nats; 0 leaves rounding alone."""
    engine_tail: float = 0.0
    """Share of tokens that lie ``TAIL`` nats apart in the mean, instead."""
    exact: bool = False
    """Engine and trainer compute the same bits."""
    layout: str = "padded"
    dtype: str = "float32"
    rollout_dtype: str | None = None
    estimator: str = "grpo"
    norm_by_std: bool = True
    gamma: float = 1.0
    lam: float = 1.0
    loss_agg_mode: str = "token-mean"
    kl_loss_type: str = "low_var_kl"
    temperature: float = 1.0
    top_p: float = 1.0
    vocab: int = 32
    update_drift: float = 0.01
    """How far the policy moves from mini-batch to mini-batch."""
    step_drift: float = 0.02
    """How far it moves from step to step; 0 is a learning rate of 0."""
    stale_steps: int = 0
    """Steps of training that the rollout's weights lag behind: a fault unless it is configured."""
    on_policy: bool = True
    """False configures the lag."""

    @property
    def half(self) -> bool:
        """True where log-probs come in half precision."""
        return self.dtype != "float32"

    @property
    def engine_half(self) -> bool:
        """The same of the engine's log-probs."""
        return (self.rollout_dtype or self.dtype) != "float32"

    @property
    def reserved(self) -> int:
        """Ids at the end of the vocabulary that the policy never samples: a tool's, an image's."""
        return 4 if self.recorded or self.images else 0

    @property
    def tool_ids(self) -> tuple[int, ...]:
        """Ids that only tools write."""
        return (self.vocab - 4, self.vocab - 3, self.vocab - 2) if self.recorded else ()

    @property
    def image_id(self) -> int:
        """The id that stands for a piece of an image."""
        return self.vocab - 1

    @property
    def varied(self) -> bool:
        """True where prompts have different numbers of rows."""
        return bool(self.counts or self.pad_rows)

    def settings(self) -> Settings:
        """The configuration that this step follows."""
        kl_loss = self.reference and not self.kl_in_reward
        known: dict[str, Any] = {
            "gamma": self.gamma,
            "lam": self.lam,
            "bypass": self.bypass,
            "exact_log_probs": True if self.exact else None,
            "image_ids": (self.image_id,) if self.images else None,
            "merge_size": 2 if self.images else None,
        }
        if self.recorded:
            known |= {
                "tool_ids": self.tool_ids,
                "cp_size": self.cp_size,
                "micro_batch_size": self.micro_rows,
                "actor_micro_batch_size": self.micro_rows,
                "ppo_epochs": 2 if self.mini_batches > 1 else 1,
            }
        return Settings(
            n=None if self.varied else self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=-1,
            adv_estimator="gae" if self.critic else self.estimator,
            norm_adv_by_std=self.norm_by_std,
            loss_agg_mode=self.loss_agg_mode,
            clip_ratio_low=0.2,
            clip_ratio_high=0.28,
            clip_ratio_c=3.0,
            use_kl_loss=kl_loss,
            kl_loss_coef=0.01 if kl_loss else None,
            kl_loss_type=self.kl_loss_type,
            entropy_coeff=0.001 if self.entropy else 0.0,
            use_kl_in_reward=self.kl_in_reward,
            multi_turn=self.multi_turn,
            rejection=self.correction or self.rejected,
            stop_ids=(STOP,),
            pad_id=PAD,
            max_response_length=self.response_width,
            vocab_size=self.vocab,
            world_size=self.ranks,
            max_token_len=self.max_token_len,
            trainer_dtype=self.dtype,
            rollout_dtype=self.rollout_dtype or self.dtype,
            ref_from_actor=True,
            on_policy=self.on_policy,
            **{name: value for name, value in known.items() if name in Settings.known()},
        )
