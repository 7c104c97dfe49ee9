"""The order in which a pipeline runs its micro-batches, and the share of time it stands idle.

A schedule holds, for each stage, the operations in the order in which the stage runs them. Stages
may hold several chunks of layers (an interleaved pipeline): chunk c of stage s is the model's part
number ``c * stages + s``. Pure functions; times are counted in units of one operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Op:
    """One forward (``backward`` False) or backward of one micro-batch through one chunk."""

    micro: int
    chunk: int = 0
    backward: bool = False


Schedule = Sequence[Sequence[Op]]


def pipeline_bubble(
    schedule: Schedule, *, forward: float = 1.0, backward: float = 1.0
) -> list[float]:
    """Share 0..1 of the whole time in which each stage has nothing to do.

    A forward waits for the same micro-batch in the part before, a backward for the part after
    (the last part's for its own forward); communication takes no time. With equal costs 1F1B of
    p stages and m micro-batches gives (p - 1) / (m + p - 1) on every stage, an interleaved one of v
    chunks (p - 1) / (v m + p - 1) (Narayanan et al., arXiv 2104.04473, 2.2). Raises ``ValueError``
    for an order that cannot run: an operation waits for one that never comes.
    """
    stages = len(schedule)
    chunks = 1 + max((op.chunk for ops in schedule for op in ops), default=0)
    last = stages * chunks - 1
    done: dict[tuple[int, int, bool], float] = {}
    clock, at = [0.0] * stages, [0] * stages

    def ready(op: Op, part: int) -> float | None:
        if not op.backward:
            return 0.0 if part == 0 else done.get((part - 1, op.micro, False))
        if part == last or not any(other.backward for other in schedule[(part + 1) % stages]):
            return done.get((part, op.micro, False))
        return done.get((part + 1, op.micro, True))

    left = sum(len(ops) for ops in schedule)
    while left:
        before = left
        for stage, ops in enumerate(schedule):
            while at[stage] < len(ops):
                op = ops[at[stage]]
                part = op.chunk * stages + stage
                start = ready(op, part)
                if start is None:
                    break
                begin = max(start, clock[stage])
                clock[stage] = begin + (backward if op.backward else forward)
                done[part, op.micro, op.backward] = clock[stage]
                at[stage] += 1
                left -= 1
        if left == before:
            stuck = {stage: ops[at[stage]] for stage, ops in enumerate(schedule)
                     if at[stage] < len(ops)}  # fmt: skip
            raise ValueError(f"the schedule waits for what never comes: {stuck}")
    whole = max(clock, default=0.0)
    busy = [sum(backward if op.backward else forward for op in ops) for ops in schedule]
    return [1.0 - spent / whole if whole else 0.0 for spent in busy]


def idle_shares(counts: Sequence[int]) -> list[float]:
    """Share 0..1 of the time in which each data-parallel rank waits for the one with the most
    micro-batches, each of which costs one unit."""
    most = max(counts, default=0)
    return [1.0 - count / most if most else 0.0 for count in counts]


def one_forward_one_backward(stages: int, micros: int) -> list[list[Op]]:
    """The 1F1B order: stage s runs ``stages - s - 1`` forwards ahead, then one of each in turn."""
    schedule = []
    for stage in range(stages):
        ahead = min(stages - stage - 1, micros)
        ops = [Op(micro) for micro in range(ahead)]
        for micro in range(micros - ahead):
            ops += [Op(ahead + micro), Op(micro, backward=True)]
        ops += [Op(micro, backward=True) for micro in range(micros - ahead, micros)]
        schedule.append(ops)
    return schedule


def interleaved(stages: int, micros: int, *, chunks: int) -> list[list[Op]]:
    """The interleaved 1F1B order in groups of ``stages`` micro-batches; ``micros`` must be a
    multiple of ``stages``. Source: Narayanan et al., arXiv 2104.04473, figure 4."""
    if micros % stages:
        raise ValueError(f"{micros} micro-batches are no multiple of {stages} stages")
    total = micros * chunks

    def op(number: int, *, backward: bool) -> Op:
        group, inside = divmod(number, stages * chunks)
        chunk = inside // stages
        return Op(
            group * stages + inside % stages, chunks - 1 - chunk if backward else chunk, backward
        )

    schedule = []
    for stage in range(stages):
        ahead = min(2 * (stages - stage - 1) + (chunks - 1) * stages, total)
        ops = [op(number, backward=False) for number in range(ahead)]
        for number in range(total - ahead):
            ops += [op(ahead + number, backward=False), op(number, backward=True)]
        ops += [op(number, backward=True) for number in range(total - ahead, total)]
        schedule.append(ops)
    return schedule
