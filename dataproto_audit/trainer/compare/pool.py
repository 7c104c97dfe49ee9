"""Processes for the ranks of several layouts, started once and used again."""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any, cast

from dataproto_audit.codes import RunError
from dataproto_audit.trainer.compare.rank import Answer, Failed, Task, serve

REMEDY = "Run the layout alone to see more, or leave it out."


class Pool:
    """Spawned processes, one a rank. A failed layout ends them all; the next starts new ones."""

    def __init__(self, *, timeout_s: float = 600.0) -> None:
        self._timeout_s = timeout_s
        self._ranks: list[tuple[Any, Any]] = []

    def run(self, tasks: Sequence[Task]) -> list[Answer]:
        """Run one layout, ``tasks`` in the order of ranks.

        Raises a rank's own error if it was meant for users, else DPA863 (a rank raised), DPA864
        (one ended) or DPA866 (no answer in time).
        """
        self.start(len(tasks))
        answers: dict[int, Answer] = {}
        try:
            for task, (_, connection) in zip(tasks, self._ranks, strict=False):
                try:
                    connection.send(task)
                except OSError:
                    raise _ended(task.rank) from None
            while len(answers) < len(tasks):
                self._take(answers, len(tasks))
        except BaseException:
            self.close(kill=True)
            raise
        return [answers[rank] for rank in range(len(tasks))]

    def _take(self, answers: dict[int, Answer], ranks: int) -> None:
        waiting: dict[Any, int] = {
            connection: rank
            for rank, (_, connection) in enumerate(self._ranks[:ranks])
            if rank not in answers
        }
        ready = wait(list(waiting), timeout=self._timeout_s)
        if not ready:
            raise RunError(
                "DPA866", f"ranks {sorted(waiting.values())} gave no answer in "
                f"{self._timeout_s:g} s.", REMEDY,
            )  # fmt: skip
        failed: list[tuple[int, Failed]] = []
        for connection in ready:
            rank = waiting[connection]
            try:
                answer: Any = cast(Any, connection).recv()
            except (EOFError, OSError):
                raise _ended(rank) from None
            if isinstance(answer, Failed):
                failed.append((rank, answer))
            else:
                answers[rank] = answer
        if failed:
            rank, first = min(failed, key=lambda pair: (pair[1].error is None, pair[0]))
            if first.error is not None:
                raise first.error
            last = first.text.strip().splitlines()
            raise RunError("DPA863", f"rank {rank} raised: {' | '.join(last[-4:])}", REMEDY)

    def start(self, ranks: int) -> None:
        """Have at least ``ranks`` processes; what they import, they import side by side."""
        context = mp.get_context("spawn")
        kept = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # read when a child loads its libraries
        try:
            while len(self._ranks) < ranks:
                ours, theirs = context.Pipe()
                process = context.Process(target=serve, args=(theirs,), daemon=True)
                process.start()
                theirs.close()
                self._ranks.append((process, ours))
        finally:
            if kept is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = kept

    def close(self, *, kill: bool = False) -> None:
        """End the processes and wait for them."""
        ranks, self._ranks = self._ranks, []
        for process, connection in ranks:
            if kill:
                process.kill()
                continue
            with suppress(OSError):  # one that is gone needs no word; the others do
                connection.send(None)
        for process, connection in ranks:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
            connection.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ended(rank: int) -> RunError:
    return RunError("DPA864", f"the process of rank {rank} ended.", REMEDY)
