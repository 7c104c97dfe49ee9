"""Known defects of verl on the way of the data, as a table.

D1 to D12 as numbered in docs/verl-flow.md; later numbers were met in real runs. ``versions`` are
the released wheels that were read or run; of versions between nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dataproto_audit.doctor.arithmetic import cut_of
from dataproto_audit.doctor.planned import ACTOR, MODEL, ROLLOUT, Planned
from dataproto_audit.doctor.problems import Problem
from dataproto_audit.findings import Severity
from dataproto_audit.integrations.known_crashes import estimator_in, straight_through

OLD, BOTH = ("0.7.1",), ("0.7.1", "0.9.1")
RECORDER, HANGS = "flight recorder", "hang helper"


@dataclass(frozen=True)
class Defect:
    """``hit`` says of a configuration whether it would run into it; None where only data tell.

    ``found_by`` are codes of checks, ``flight recorder`` where verl raises and the input of the
    stage is kept, ``hang helper`` where ranks wait and are named, or '' where nothing finds it.
    """

    number: str
    versions: tuple[str, ...]
    text: str
    found_by: str
    level: Severity
    hit: Callable[[Planned], bool] | None
    remedy: str = ""


def _estimator(*names: str) -> Callable[[Planned], bool]:
    return lambda p: estimator_in(*names)(p.get)


def _warmup(p: Planned) -> bool:
    return p.count("trainer.critic_warmup") > 0 and bool(p.get(f"{ROLLOUT}.free_cache_engine"))


def _reward_model(pool: bool) -> Callable[[Planned], bool]:
    at = "reward.reward_model"
    return lambda p: (
        bool(p.get(f"{at}.enable")) and pool == bool(p.get(f"{at}.enable_resource_pool"))
    )


def _remax_colocated(p: Planned) -> bool:
    return _estimator("remax")(p) and _reward_model(False)(p)


def _remax_scored(p: Planned) -> bool:
    return _estimator("remax")(p) and not _reward_model(False)(p)


def _straight_through(p: Planned) -> bool:
    return straight_through(p.get)


def several_turns(p: Planned) -> bool:
    """True where an agent loop may put text of a tool between sampled tokens."""
    agent = p.get(f"{ROLLOUT}.agent.default_agent_loop")
    return bool(p.get(f"{ROLLOUT}.multi_turn.enable")) or agent != "single_turn_agent"


def _returns_lost(p: Planned) -> bool:
    return _estimator("reinforce_plus_plus")(p) and several_turns(p)


def _uneven(p: Planned) -> bool:
    ranks = p.gpus // p.ulysses
    return not p.engine and not p.megatron and ranks > 1 and bool(p.get(f"{ACTOR}.use_dynamic_bsz"))


def _dynamic(p: Planned) -> bool:
    return bool(p.get(f"{ACTOR}.use_dynamic_bsz"))


def _engine_critic(p: Planned) -> bool:
    return p.engine and p.critic


def _critic_scale(p: Planned) -> bool:
    if not _engine_critic(p):
        return False
    rows = p.count("critic.ppo_mini_batch_size") * p.size(f"{ROLLOUT}.n") // p.gpus
    micro = p.get("critic.ppo_micro_batch_size_per_gpu")
    return bool(p.get("critic.use_dynamic_bsz")) or (isinstance(micro, int) and 0 < micro < rows)


def _ignores_mode(*names: str) -> Callable[[Planned], bool]:
    def hit(p: Planned) -> bool:
        mode = p.get(f"{ACTOR}.loss_agg_mode")
        return p.get(f"{ACTOR}.policy_loss.loss_mode") in names and mode != "seq-mean-token-mean"

    return hit


def _means_added(p: Planned) -> bool:
    own = p.size(f"{ACTOR}.ppo_mini_batch_size") * p.size(f"{ROLLOUT}.n") // cut_of(p).dp
    micro = p.get(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    several = _dynamic(p) or (isinstance(micro, int) and 0 < micro < own)
    return p.engine and several and p.get(f"{ACTOR}.policy_loss.loss_mode") == "geo_mean"


def _mask_from_loss(p: Planned) -> bool:
    return p.engine and not p.megatron and not p.get(f"{MODEL}.use_remove_padding")


def _not_exchanged(p: Planned) -> bool:
    kernel = p.get(f"{MODEL}.override_config.attn_implementation")
    return not p.megatron and p.ulysses > 1 and kernel == "sdpa"


SAYS_MODE = f"Set {ACTOR}.loss_agg_mode=seq-mean-token-mean, which is what is computed."
DEFECTS = (
    Defect("D1", OLD, "During critic warm-up nothing wakes the rollout servers that were put to "
           "sleep after a generation, so that the next one may meet a sleeping server.",
           RECORDER, "warn", _warmup, f"Set {ROLLOUT}.free_cache_engine=False."),
    Defect("D2", OLD, "ReMax generates its baseline right after the rollout servers were put to "
           "sleep.", RECORDER, "warn", _estimator("remax"), "Use another estimator, or 0.9.1."),
    Defect("D3", OLD, "The baseline of ReMax is sampled instead of greedy: do_sample of the batch "
           "is read by no agent loop.", "", "warn", _estimator("remax"), "Use verl 0.9.1."),
    Defect("D4", OLD, "ReMax with a colocated reward model scores the baseline only, and the "
           "sampled rows are not scored again.", "DPA405", "fail", _remax_colocated,
           "Give the reward model a pool of its own."),
    Defect("D5", BOTH, "A discriminative reward model that scores while rollouts come in returns "
           "no reward_extra_info, which the agent loop reads: KeyError.", RECORDER, "warn",
           _reward_model(True), "Score with a reward function of your own, or colocate the model."),
    Defect("D6", OLD, "A KL estimator with a trailing + raises NotImplementedError.", RECORDER,
           "fail", _straight_through, "Name the estimator without +."),
    Defect("D7", OLD, "The optimal-token-baseline estimators raise TypeError in "
           "compute_advantage.", RECORDER, "fail",
           _estimator("optimal_token_baseline", "tir_optimal_token_baseline"), "Use verl 0.9.1."),
    Defect("D8", OLD, "REINFORCE++ resets the running return at tokens of a tool: what was sampled "
           "in front of a tool reply gets return 0.", "DPA416", "fail", _returns_lost,
           "Use verl 0.9.1, or another estimator."),
    Defect("D9", OLD, "Legacy FSDP workers do not agree on the number of dynamic micro-batches, "
           "and ranks that run different numbers of them wait for each other for ever.",
           f"DPA705, {HANGS}", "warn", _uneven, f"Set {ACTOR}.use_dynamic_bsz=False, or "
           "trainer.use_legacy_worker_impl=disable."),
    Defect("D10", OLD, "A dynamic micro-batch may hold more tokens than its limit.", "DPA704",
           "warn", _dynamic, f"Leave a fifth of memory free, or lower "
           f"{ACTOR}.ppo_max_token_len_per_gpu."),
    Defect("D11", OLD, "The engine's critic loss is a mean of each micro-batch, summed: its scale "
           "grows with their number.", "DPA506", "fail", _critic_scale,
           "Let one micro-batch hold the mini-batch, or use legacy workers."),
    Defect("D12", OLD, "GSPO, SAPO and geo_mean compute seq-mean-token-mean whatever "
           "loss_agg_mode says.", "DPA502", "fail",
           _ignores_mode("gspo", "sapo", "geo_mean"), SAYS_MODE),
    Defect("D12", ("0.9.1",), "SAPO and geo_mean compute seq-mean-token-mean whatever "
           "loss_agg_mode says.", "DPA502", "fail", _ignores_mode("sapo", "geo_mean"),
           SAYS_MODE),
    Defect("D13", OLD, "Engine workers without remove-padding attend by the loss mask, so that all "
           "log-probs are wrong (verl issue 6278).", "DPA707, DPA303", "fail", _mask_from_loss,
           f"Set {MODEL}.use_remove_padding=True."),
    Defect("D14", OLD, "Ulysses with attn_implementation=sdpa is accepted, and "
           "attention is not exchanged between ranks: rows that are cut get wrong log-probs.",
           "DPA707, DPA310", "fail", _not_exchanged, "Use flash_attention_2, or no Ulysses."),
    Defect("D15", OLD, "ReMax leaves score (or acc) of its baseline in the batch, and the union of "
           "the first step fails.", "DPA115", "fail", _remax_scored,
           "Use another estimator, or verl 0.9.1 with trainer.use_v1=False."),
    Defect("D16", BOTH, "An empty response stops the agent loop, or is lost in silence in V1.",
           f"DPA401, {RECORDER}", "warn", None),
    Defect("D17", BOTH, "The loss geo_mean on engine workers is a mean over rows of each "
           "micro-batch, summed: its scale grows with their number.", "DPA502", "fail",
           _means_added, "Let one micro-batch hold the mini-batch."),
    Defect("D18", OLD, "The engine's critic trains with the dropout of its checkpoint (0.1 where "
           "that names none), which legacy workers switch off.", "DPA505", "warn",
           _engine_critic, "Write classifier_dropout 0.0 into the critic's config.json."),
)  # fmt: skip


def defects_of(version: str) -> list[Defect]:
    """Those of a version; none for one that is not known."""
    return [defect for defect in DEFECTS if version in defect.versions]


def defects_hit(plan: Planned) -> Iterator[Problem]:
    """Known defects of its version that a configuration would run into."""
    for defect in defects_of(plan.version):
        if defect.hit is not None and defect.hit(plan):
            code = next((w for w in defect.found_by.split(", ") if w.startswith("DPA")), "")
            yield Problem(defect.level, code, defect.text, defect.remedy, defect.number)
