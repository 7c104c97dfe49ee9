"""What a simulated healthy step looks like."""

from __future__ import annotations

from dataclasses import dataclass

from dataproto_audit.probes.context import Settings
from dataproto_audit.testing.toy_policy import PAD, STOP


@dataclass(frozen=True)
class Options:
    """What the step looks like. ``dtype`` is the precision of trainer and engine.

    ``one_token`` rows stop at once, ``truncated`` rows never stop; both count rows from the first
    on. ``multi_turn`` puts tool tokens, which are not trained on, into every other row.
    ``reference`` runs the reference model with a KL loss, ``critic`` makes it GAE with values.
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
    balanced: bool = True
    one_token: int = 1
    truncated: int = 1
    duplicate_prompts: bool = False
    equal_groups: bool = False
    reference: bool = True
    kl_in_reward: bool = False
    critic: bool = False
    entropy: bool = False
    multi_turn: bool = False
    dtype: str = "float32"
    estimator: str = "grpo"
    norm_by_std: bool = True
    loss_agg_mode: str = "token-mean"
    kl_loss_type: str = "low_var_kl"
    temperature: float = 1.0
    vocab: int = 32
    stale_steps: int = 0
    """Steps of training that the rollout's weights lag behind: a fault unless it is configured."""

    @property
    def half(self) -> bool:
        """True where log-probs come in half precision."""
        return self.dtype != "float32"

    def settings(self) -> Settings:
        """The configuration that this step follows."""
        return Settings(
            n=self.n,
            temperature=self.temperature,
            top_p=1.0,
            top_k=-1,
            adv_estimator="gae" if self.critic else self.estimator,
            norm_adv_by_std=self.norm_by_std,
            loss_agg_mode=self.loss_agg_mode,
            clip_ratio_low=0.2,
            clip_ratio_high=0.28,
            clip_ratio_c=3.0,
            use_kl_loss=self.reference,
            kl_loss_coef=0.01 if self.reference else None,
            kl_loss_type=self.kl_loss_type,
            entropy_coeff=0.001 if self.entropy else 0.0,
            use_kl_in_reward=self.kl_in_reward,
            multi_turn=self.multi_turn,
            rejection=False,
            stop_ids=(STOP,),
            pad_id=PAD,
            max_response_length=self.response_width,
            vocab_size=self.vocab,
            world_size=self.ranks,
            trainer_dtype=self.dtype,
            rollout_dtype=self.dtype,
            ref_from_actor=True,
            on_policy=True,
        )
