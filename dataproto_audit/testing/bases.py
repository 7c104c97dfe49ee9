"""The healthy batches that faults are made in, and those that must stay quiet."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dataproto_audit.testing.options import Options

_PLAIN = Options(prompts=12, n=4, response_width=12, step=2)
_TOOLS = replace(_PLAIN, multi_turn=True, response_width=10)
_LONG = Options(prompts=8, n=4, prompt_width=9, response_width=16, ranks=4, step=2, micro_rows=2)
_FAR = replace(_PLAIN, mini_batches=4, update_drift=6.0)

BASES: dict[str, Options] = {
    "plain": _PLAIN,
    "unbalanced": Options(
        prompts=18, n=3, response_width=10, balanced=False, ranks=1, mini_batches=2, step=2, seed=3
    ),
    "long": _LONG,
    "lopsided": replace(_PLAIN, response_width=40, one_token=24, truncated=12),
    "pairs": Options(prompts=16, n=2, response_width=10, step=2),
    "entropy": replace(_PLAIN, entropy=True),
    "dynamic": replace(_LONG, max_token_len=48),
    "drifting": replace(_PLAIN, mini_batches=2),
    "far": _FAR,
    "half": replace(_LONG, dtype="bfloat16"),
    "half_still": replace(_LONG, dtype="bfloat16", recorded=True, step_drift=0.0),
    "cold": replace(_PLAIN, temperature=0.6),
    "cold_long": replace(_LONG, temperature=0.6),
    "tools": _TOOLS,
    "critic": replace(_PLAIN, critic=True),
    "critic_tools": replace(_TOOLS, critic=True),
    "kl_reward": replace(_FAR, kl_in_reward=True, step=30),
    "kl_reward_far": replace(_FAR, kl_in_reward=True, step=30, seed=2),
    "kl_reward_tools": replace(_TOOLS, kl_in_reward=True, step=30),
    "no_std": replace(_PLAIN, norm_by_std=False),
    "passk": replace(_PLAIN, estimator="grpo_passk"),
    "rloo": replace(_PLAIN, estimator="rloo"),
    "rloo_single": replace(_PLAIN, estimator="rloo", n=1, prompts=48),
    "remax": replace(_PLAIN, estimator="remax"),
    "rpp_baseline": replace(_PLAIN, estimator="reinforce_plus_plus_baseline"),
    "rpp_tools": replace(_TOOLS, estimator="reinforce_plus_plus"),
    "corrected": replace(_PLAIN, correction=True),
    "corrected_critic": replace(_PLAIN, correction=True, critic=True),
    "corrected_stale": replace(_LONG, correction=True, stale_steps=20, on_policy=False),
    "aborted": replace(_PLAIN, aborted=3),
    "padded_rows": replace(_PLAIN, prompts=11, pad_rows=4),
    "channels": replace(_PLAIN, channels=4),
    "images": replace(_PLAIN, images=True),
    "recorded": replace(_PLAIN, recorded=True, micro_rows=6, mini_batches=2),
    "recorded_tools": replace(_TOOLS, recorded=True, micro_rows=6),
}
"""By name; the step is the first that a fault is made at, unless the fault says otherwise."""


UNTOLD = (
    "plain", "kl in reward", "kl in reward, gae, tools", "half precision", "correction",
    "half precision, tool turns", "different n", "filler rows", "bypass", "rloo",
    "published gap, far tokens", "aborted rows, gae", "garbage on padding", "without std",
    "rejection, gae", "rejection",
)  # fmt: skip
"""Healthy configurations that are audited a second time with no setting told."""


SAVED = (
    "filler rows", "filler rows, different n", "rejection, gae", "rejection", "rejection, tools",
    "rejection, kl in reward", "correction", "correction, kl in reward", "correction, gae",
    "kl in reward, gae, tools", "aborted rows, gae", "bypass", "grpo tool turns",
)  # fmt: skip
"""Healthy configurations whose last batch is checked in one piece, too, as of a saved file."""


@dataclass(frozen=True)
class Healthy:
    """A configuration that must stay quiet, for ``steps`` steps of each seed."""

    name: str
    options: Options
    steps: int = 2
    recomputed: bool = False
    """Log-probs are recomputed with the policy itself."""
    untold: bool = False
    """Nobody tells a setting, as of a saved file."""
    saved: bool = False
    """The batch is checked once, as it left the update."""


def healthy_configurations() -> list[Healthy]:
    """Every configuration of the healthy set, from the first step on."""
    plain, tools = replace(_PLAIN, step=1), replace(_TOOLS, step=1)
    published = replace(plain, rollout_dtype="bfloat16")
    far = replace(published, engine_gap=0.009, engine_tail=0.01)
    varied = (1, 2, 6, 3, 4, 5, 7, 4, 4, 3, 5, 4)
    made: dict[str, Options] = {
        f"{estimator} {way}": replace(base, estimator=estimator)
        for estimator in ("grpo", "rloo", "opo", "gpg", "grpo_passk", "remax",
                          "reinforce_plus_plus", "reinforce_plus_plus_baseline")
        for way, base in (("static", plain), ("dynamic", replace(plain, max_token_len=48)),
                          ("tool turns", tools))
    }  # fmt: skip
    made |= {
        "gae": replace(plain, critic=True),
        "gae, tool turns": replace(tools, critic=True),
        "gae, one sample": replace(plain, critic=True, n=1, prompts=48),
        "gae, discounted": replace(plain, critic=True, gamma=0.99, lam=0.95),
        "reinforce++, one sample": replace(
            plain, estimator="reinforce_plus_plus", n=1, prompts=48
        ),
        "mean only": replace(plain, norm_by_std=False),
        "groups of one": replace(plain, n=1, prompts=48),
        "two samples": replace(plain, n=2, prompts=24),
        "equal groups": replace(plain, equal_groups=True),
        "duplicate prompts": replace(plain, duplicate_prompts=True),
        "unbalanced": replace(plain, balanced=False),
        "one rank": replace(plain, ranks=1),
        "four ranks": replace(plain, ranks=4),
        "four ranks, dynamic, mini-batches": replace(
            plain, ranks=4, mini_batches=2, max_token_len=40
        ),
        "eight mini-batches": replace(plain, mini_batches=8, ranks=1),
        "far mini-batches": replace(_FAR, step=1),
        "no reference": replace(plain, reference=False),
        "k1 loss": replace(plain, kl_loss_type="kl"),
        "sequence mean": replace(plain, loss_agg_mode="seq-mean-token-mean"),
        "sequence sum": replace(plain, loss_agg_mode="seq-mean-token-sum"),
        "sequence sum, fixed": replace(plain, loss_agg_mode="seq-mean-token-sum-norm"),
        "entropy bonus": replace(plain, entropy=True),
        "kl in reward": replace(plain, kl_in_reward=True),
        "kl in reward, gae, tools": replace(tools, kl_in_reward=True, critic=True),
        "half precision": replace(plain, dtype="bfloat16"),
        "half precision engine": replace(plain, rollout_dtype="bfloat16"),
        "half precision, tool turns": replace(tools, dtype="bfloat16"),
        "published gap": replace(published, engine_gap=0.010),
        "published gap, largest": replace(published, engine_gap=0.018),
        "published gap, far tokens": far,
        "published gap, far tokens, two samples": replace(far, n=2, prompts=24),
        "published gap, far tokens, tool turns": replace(far, multi_turn=True, response_width=10),
        "published gap, far tokens, gae, dynamic": replace(far, critic=True, max_token_len=48),
        "published gap, far tokens, correction": replace(far, correction=True),
        "published gap, far tokens, half precision": replace(far, dtype="bfloat16"),
        "cold": replace(plain, temperature=0.5),
        "hot": replace(plain, temperature=1.5),
        "top-p": replace(plain, top_p=0.9),
        "stale by design": replace(plain, stale_steps=20, on_policy=False),
        "bypass": replace(plain, bypass=True),
        "bypass, half precision": replace(plain, bypass=True, dtype="bfloat16"),
        "correction": replace(plain, correction=True),
        "correction, tools": replace(tools, correction=True),
        "correction, bypass": replace(plain, correction=True, bypass=True),
        "correction, stale, half": replace(
            plain, correction=True, stale_steps=20, on_policy=False, dtype="bfloat16"
        ),
        "all rows end at once": replace(plain, one_token=48),
        "no row ends": replace(plain, one_token=0, truncated=48),
        "rows end in a tool reply": replace(tools, response_width=7, truncated=9),
        "aborted rows": replace(plain, aborted=3),
        "aborted rows, gae": replace(plain, aborted=3, critic=True),
        "different n": replace(plain, counts=varied),
        "different n, gae, dynamic": replace(
            plain, counts=varied, critic=True, max_token_len=48
        ),
        "filler rows": replace(plain, prompts=11, pad_rows=4),
        "filler rows, different n": replace(plain, prompts=4, counts=(3, 4, 6, 1), pad_rows=2),
        "rejection, gae": replace(plain, rejected=True, critic=True),
        "rejection": replace(plain, rejected=True),
        "rejection, tools": replace(tools, rejected=True),
        "rejection, kl in reward": replace(plain, rejected=True, kl_in_reward=True),
        "correction, kl in reward": replace(plain, correction=True, kl_in_reward=True),
        "correction, gae": replace(plain, correction=True, critic=True),
        "position channels": replace(plain, channels=4),
        "images": replace(plain, images=True),
        "images, unbalanced": replace(plain, images=True, balanced=False, prompt_width=9),
        "images, half precision": replace(plain, images=True, dtype="bfloat16"),
        "exactly equal": replace(plain, exact=True),
        "exactly equal, tool turns": replace(tools, exact=True),
        "nothing learnt": replace(plain, exact=True, step_drift=0.0),
        "recorded": replace(plain, recorded=True, micro_rows=6),
        "recorded, dynamic": replace(plain, recorded=True, max_token_len=48),
        "recorded, filler rows": replace(
            plain, recorded=True, prompts=11, pad_rows=4, max_token_len=48
        ),
        "garbage on padding": replace(plain, pad_garbage=True),
        "jagged": replace(plain, layout="jagged"),
        "jagged, tool turns, gae": replace(tools, layout="jagged", critic=True),
        "jagged, half precision": replace(plain, layout="jagged", dtype="bfloat16"),
        "long rows": replace(_LONG, step=1, response_width=48, truncated=12),
        "one prompt token": replace(plain, prompt_width=1),
        "small vocabulary": replace(plain, vocab=5),
    }  # fmt: skip
    more = {"equal groups": 1, "images": 5, "images, unbalanced": 5, "images, half precision": 5,
            "exactly equal": 6, "nothing learnt": 12, "exactly equal, tool turns": 6,
            "recorded, dynamic": 6,
            "recorded, filler rows": 10, "kl in reward": 4, "kl in reward, gae, tools": 4,
            "published gap, far tokens": 4, "correction": 4}  # fmt: skip
    recomputed = ("nothing learnt", "cold", "garbage on padding", "kl in reward, gae, tools")
    listed = [Healthy(name, options, more.get(name, 2), name in recomputed)
              for name, options in made.items()]  # fmt: skip
    untold = [replace(one, name=f"{one.name}, nothing told", untold=True) for one in listed
              if one.name in UNTOLD]  # fmt: skip
    once = [replace(one, name=f"{one.name}, as saved", saved=True) for one in [*listed, *untold]
            if one.name.removesuffix(", nothing told") in SAVED]  # fmt: skip
    return [*listed, *untold, *once,
            Healthy("a run of thirty steps", replace(plain, mini_batches=2), 30),
            Healthy("a tool run of thirty steps", replace(tools, critic=True), 30),
            Healthy("a recorded run of thirty steps",
                    replace(plain, recorded=True, micro_rows=6, mini_batches=2), 30),
            Healthy("a recorded tool run of thirty steps",
                    replace(tools, recorded=True, micro_rows=6, mini_batches=2), 30),
            Healthy("a run of twenty steps with a published gap",
                    replace(far, response_width=24), 20),
            Healthy("a run of thirty half-precision steps", replace(plain, dtype="bfloat16"), 30),
            Healthy("a run of thirty stale steps, with entropy",
                    replace(plain, stale_steps=8, on_policy=False, entropy=True), 30),
            ]  # fmt: skip
