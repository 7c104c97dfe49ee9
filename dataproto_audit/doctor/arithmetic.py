"""How a configuration cuts its rows over ranks and mini- and micro-batches, and where it cannot.

Rules as the workers of verl apply them: ``verl/utils/config.py`` (validate_config), legacy
``workers/fsdp_workers.py:249-268``, ``protocol.py`` make_iterator, engine
``workers/engine_workers.py:239`` and ``workers/engine/utils.py`` (prepare_micro_batches).
Not covered: virtual pipeline stages, expert parallelism, several samples per session in V1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, lcm, prod

from dataproto_audit.doctor.planned import ACTOR, MODEL, REF, ROLLOUT, Planned
from dataproto_audit.doctor.problems import Problem
from dataproto_audit.findings import Severity

GROUP_RELATIVE = ("grpo", "grpo_vectorized", "grpo_passk", "gdpo", "rloo", "rloo_vectorized", "opo",
                  "reinforce_plus_plus_baseline", "gpg")  # fmt: skip


@dataclass(frozen=True)
class Cut:
    """Counts of one step. ``dp``: ranks that hold different rows. ``per_rank``: rows of a rank;
    ``mini``: rows of a mini-batch on a rank; ``minis``: mini-batches of an epoch; ``longest``:
    tokens of the longest possible row; ``split``: ranks that share one row's tokens (cp or sp)."""

    gpus: int
    dp: int
    rows: int
    per_rank: int
    mini: int
    minis: int
    longest: int
    split: int


def cut_of(p: Planned) -> Cut:
    """The counts, rounded as verl rounds them; V1 fills the batch up first."""
    n, mini = p.size(f"{ROLLOUT}.n"), p.size(f"{ACTOR}.ppo_mini_batch_size")
    rows, dp = p.size("data.train_batch_size") * n, max(1, p.gpus // prod(p.splits.values()))
    if p.v1:
        several = lcm(dp, mini * n)
        rows = ceil(rows / several) * several
    per_rank, own = rows // dp, max(1, mini * n // dp)
    longest = p.size("data.max_prompt_length") + p.size("data.max_response_length")
    split = p.splits.get("cp", p.splits.get("sp", 1))
    return Cut(p.gpus, dp, rows, per_rank, own, ceil(per_rank / own), longest, split)


def lines(p: Planned) -> list[str]:
    """The arithmetic as text, one step, one rank."""
    cut, sizes = cut_of(p), " x ".join(f"{k} {v}" for k, v in p.splits.items())
    made = p.size("data.train_batch_size") * p.size(f"{ROLLOUT}.n")
    filled = f", filled up to {cut.rows}" if cut.rows != made else ""
    said = [
        f"ranks: {cut.gpus} = dp {cut.dp} x {sizes}",
        f"rows: {p.size('data.train_batch_size')} prompts x n {p.size(f'{ROLLOUT}.n')} = {made}"
        f"{filled}; {cut.per_rank} a rank",
        f"mini-batches: {cut.minis} an epoch, of {cut.mini} rows a rank",
    ]
    if p.get(f"{ACTOR}.use_dynamic_bsz"):
        limit = p.count(f"{ACTOR}.ppo_max_token_len_per_gpu") * cut.split
        most = ceil(cut.mini * cut.longest / limit) if limit else 0
        said.append(
            f"micro-batches: dynamic, limit {limit} tokens; longest row {cut.longest}; if all rows "
            f"of a mini-batch are that long, at least {most}"
        )
    else:
        micro = p.get(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
        if isinstance(micro, int) and micro > 0:
            said.append(f"micro-batches: {ceil(cut.mini / micro)} a mini-batch, of {micro} rows")
    return said


def problems(p: Planned) -> Iterator[Problem]:
    """What does not divide or does not fit."""
    yield from _ranks(p)
    yield from _rows(p)
    roles = [("actor", ACTOR)] + ([("critic", "critic")] if p.critic else [])
    for role, at in roles:
        yield from _mini(p, role, at)
        yield from _limits(p, at, "ppo_max_token_len_per_gpu", f"{at}.use_dynamic_bsz")
    scored = [ROLLOUT] + ([REF] if p.reference else [])
    for at in scored:
        yield from _log_prob(p, at)
    yield from _kinds(p)


def _wrong(text: str, remedy: str = "", code: str = "DPA854", level: Severity = "fail") -> Problem:
    return Problem(level, code, text, remedy)


def _ranks(p: Planned) -> Iterator[Problem]:
    together = prod(p.splits.values())
    if p.gpus % together:
        sizes = " x ".join(f"{k} {v}" for k, v in p.splits.items())
        yield _wrong(
            f"{p.gpus} ranks cannot be divided by {sizes} = {together}.",
            "Change trainer.n_gpus_per_node or the parallel sizes.",
        )


def _rows(p: Planned) -> Iterator[Problem]:
    cut = cut_of(p)
    rows = p.size("data.train_batch_size") * p.size(f"{ROLLOUT}.n")
    text = f"data.train_batch_size x rollout.n = {rows}"
    if not p.get(f"{ACTOR}.use_dynamic_bsz"):
        micro = p.get(f"{ACTOR}.ppo_micro_batch_size_per_gpu") or 1
        smallest = cut.dp * int(micro) if p.megatron else p.gpus
        if rows % smallest:
            what = "dp x ppo_micro_batch_size_per_gpu" if p.megatron else "ranks"
            yield _wrong(f"{text} cannot be divided by {smallest} ({what}); verl refuses it.")
            return
    if not p.v1 and rows % cut.dp:
        yield _wrong(f"{text} cannot be divided by the {cut.dp} data-parallel ranks.")
    workers = p.size(f"{ROLLOUT}.agent.num_workers")
    if not p.v1 and rows % workers:
        yield _wrong(
            f"{text} cannot be divided by the {workers} agent-loop workers.",
            f"Set {ROLLOUT}.agent.num_workers to a divisor.",
        )


def _mini(p: Planned, role: str, at: str) -> Iterator[Problem]:
    cut, n = cut_of(p), p.size(f"{ROLLOUT}.n")
    prompts, mini = p.size("data.train_batch_size"), p.size(f"{at}.ppo_mini_batch_size")
    key, dynamic = f"{at}.ppo_mini_batch_size", bool(p.get(f"{at}.use_dynamic_bsz"))
    legacy_fsdp = not p.engine and not p.megatron
    if mini > prompts and not dynamic:
        yield _wrong(f"{key}={mini} is larger than data.train_batch_size={prompts}.",
                     f"Lower {key}.")  # fmt: skip
        return
    if (mini * n) % cut.dp:
        own = mini * n // cut.dp
        harmless = not p.engine and own > 0
        yield _wrong(
            f"{key} x n = {mini * n} rows cannot be divided by the {cut.dp} data-parallel ranks"
            + (f"; the {role} takes {own} rows a rank instead." if harmless else "."),
            f"Make {key} x n a multiple of {cut.dp}.",
            level="warn" if harmless else "fail",
        )
        if not harmless:
            return
    if not p.v1 and prompts % mini:
        yield _wrong(
            f"data.train_batch_size={prompts} is no multiple of {key}={mini}"
            + ("; the last mini-batch is smaller." if legacy_fsdp else "."),
            level="warn" if legacy_fsdp else "fail",
        )
    if not dynamic:
        yield from _micro(p, role, at, mini * n // cut.dp)


def _micro(p: Planned, role: str, at: str, own: int) -> Iterator[Problem]:
    per_gpu, total = (p.get(f"{at}.ppo_micro_batch_size{end}") for end in ("_per_gpu", ""))
    key = f"{at}.ppo_micro_batch_size_per_gpu"
    if (per_gpu is None) == (total is None):
        word = "neither" if per_gpu is None else "both"
        yield _wrong(
            f"{word} of {key} and {at}.ppo_micro_batch_size {'is' if word == 'neither' else 'are'} "
            "set, and one is needed.",
            f"Set {key}, or {at}.use_dynamic_bsz=True.",
            "DPA851",
        )
    elif per_gpu is not None and own % p.size(key):
        yield _wrong(
            f"{own} rows of a mini-batch on a rank of the {role} cannot be divided by "
            f"{key}={per_gpu}.", f"Choose a divisor of {own}.",
        )  # fmt: skip


def _log_prob(p: Planned, at: str) -> Iterator[Problem]:
    dynamic = f"{at}.log_prob_use_dynamic_bsz"
    if p.get(dynamic):
        yield from _limits(p, at, "log_prob_max_token_len_per_gpu", dynamic)
        return
    key, cut = f"{at}.log_prob_micro_batch_size_per_gpu", cut_of(p)
    micro, other = p.get(key), p.get(f"{at}.log_prob_micro_batch_size")
    if micro is None and other is None:
        yield _wrong(f"{key} is not set.", f"Set it, or {dynamic}=True.", "DPA851")
    elif micro is not None and other is not None:
        yield _wrong(f"{key} and its form without _per_gpu are both set.", "Keep the first.",
                     "DPA851")  # fmt: skip
    elif p.engine and micro is not None and cut.per_rank % p.size(key):
        yield _wrong(f"{cut.per_rank} rows of a rank cannot be divided by {key}={micro}.",
                     f"Choose a divisor of {cut.per_rank}.")  # fmt: skip


def _limits(p: Planned, at: str, name: str, switch: str) -> Iterator[Problem]:
    if not p.get(switch):
        return
    cut = cut_of(p)
    limit = p.count(f"{at}.{name}") * cut.split
    if limit >= cut.longest:
        return
    always = not p.engine  # legacy compares the limit with the padded length
    yield _wrong(
        f"{at}.{name} x {cut.split} = {limit} tokens, and a row may have {cut.longest} "
        "(data.max_prompt_length + data.max_response_length)"
        + ("; verl refuses it." if always else "; the first row longer than the limit stops it."),
        f"Raise {at}.{name} to {ceil(cut.longest / cut.split)}.",
        "DPA856",
        "fail" if always else "warn",
    )


def _kinds(p: Planned) -> Iterator[Problem]:
    estimator, n = p.get("algorithm.adv_estimator"), p.size(f"{ROLLOUT}.n")
    if estimator in GROUP_RELATIVE and n < 2:
        yield _wrong(
            f"{estimator} compares the samples of a prompt, and {ROLLOUT}.n is {n}.",
            f"Set {ROLLOUT}.n to 2 or more.", "DPA855", "warn",
        )  # fmt: skip
    if not p.megatron and p.ulysses > 1 and not p.get(f"{MODEL}.use_remove_padding"):
        yield _wrong("Ulysses needs remove-padding.", f"Set {MODEL}.use_remove_padding=True.",
                     "DPA851")  # fmt: skip
    own, scoring = f"{ACTOR}.use_dynamic_bsz", f"{ROLLOUT}.log_prob_use_dynamic_bsz"
    if p.engine and bool(p.get(own)) != bool(p.get(scoring)):
        yield _wrong(f"{own} and {scoring} differ, which engine workers refuse.",
                     "Set both alike.", "DPA851")  # fmt: skip
