"""Overrides of verl's configuration for the real runs; ``runs.COMMON`` is what all share."""

from .runs import HELPERS, ROLES

VALIDATES = ("trainer.val_before_train=True", "trainer.test_freq=1")
QUIET = ("trainer.val_before_train=False", "trainer.test_freq=-1")

ENGINE = (
    "trainer.use_legacy_worker_impl=disable", f"{ROLES}.model.use_remove_padding=True",
    f"{ROLES}.actor.use_dynamic_bsz=True", f"{ROLES}.actor.ppo_max_token_len_per_gpu=120",
    f"{ROLES}.ref.log_prob_use_dynamic_bsz=True",
    f"{ROLES}.ref.log_prob_max_token_len_per_gpu=120",
    f"{ROLES}.rollout.log_prob_use_dynamic_bsz=True",
    f"{ROLES}.rollout.log_prob_max_token_len_per_gpu=120",
)  # fmt: skip
GAE = (
    "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=True",
    f"{ROLES}.actor.use_kl_loss=False", f"{ROLES}.rollout.n=1",
    f"{ROLES}.actor.ppo_micro_batch_size_per_gpu=2",
    f"{ROLES}.rollout.log_prob_micro_batch_size_per_gpu=2",
    f"{ROLES}.ref.log_prob_micro_batch_size_per_gpu=2",
    "critic.ppo_mini_batch_size=2", "critic.ppo_micro_batch_size_per_gpu=2",
)  # fmt: skip
LEGACY = ("critic.model.use_remove_padding=False",
          "critic.model.enable_gradient_checkpointing=False")  # fmt: skip
EXACT = "{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}"
FP32 = tuple(f"++{ROLES}.{r}.fsdp_config.mixed_precision={EXACT}" for r in ("actor", "ref"))
V0 = ("trainer.use_v1=False", f"{ROLES}.model.use_remove_padding=True")
TWO = ("trainer.n_gpus_per_node=2", f"{ROLES}.actor.ppo_micro_batch_size_per_gpu=2")

V1 = ("trainer.use_v1=True", f"{ROLES}.model.use_remove_padding=True")
V1_FSDP2 = (
    *V1, "trainer.n_gpus_per_node=2", f"{ROLES}.rollout.n_gpus_per_node=2",
    f"{ROLES}.actor.strategy=fsdp2", f"{ROLES}.ref.strategy=fsdp2", "critic.strategy=fsdp2",
)  # fmt: skip
DYNAMIC_V1 = (
    *ENGINE[1:], "critic.ppo_max_token_len_per_gpu=120",
    "critic.forward_max_token_len_per_gpu=120",
)  # fmt: skip

TOOLS = (
    "data.max_response_length=64", f"{ROLES}.rollout.agent.default_agent_loop=tool_agent",
    f"{ROLES}.rollout.multi_turn.enable=True", f"{ROLES}.rollout.multi_turn.format=tiny",
    f"{ROLES}.rollout.multi_turn.max_assistant_turns=2",
    f"{ROLES}.rollout.multi_turn.tool_config_path={HELPERS}/toy_tools.yaml",
)  # fmt: skip
"""Two answers, with the reply of a tool between them where the first one calls it."""
BYPASS = ("algorithm.rollout_correction.bypass_mode=True",)
CORRECTION = (
    "algorithm.rollout_correction.rollout_is=token",
    "algorithm.rollout_correction.rollout_rs=token_k1",
    "algorithm.rollout_correction.rollout_rs_threshold='0.98_1.02'",
)
"""Importance weights, and tokens whose ratio bfloat16 moved by two in a hundred are not trained."""
