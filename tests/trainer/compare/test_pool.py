"""Ranks that are gone: said with a code, and the others are ended all the same."""

import multiprocessing as mp
from types import SimpleNamespace

import pytest

from dataproto_audit.codes import RunError
from dataproto_audit.trainer.compare.pool import Pool


class Process:
    """What the pool asks of a process."""

    def __init__(self):
        self.did = []

    def __getattr__(self, name):
        return lambda *_: self.did.append(name)

    def is_alive(self):
        return False


@pytest.fixture
def made():
    """``made(GONE, ...)``: a pool whose ranks have or have not left their end of the pipe."""
    kept = []

    def make(*gone):
        pool = Pool(timeout_s=5)
        for left in gone:
            ours, theirs = mp.Pipe()
            kept.append(theirs)
            if left:
                theirs.close()
            pool._ranks.append((Process(), ours))
        return pool, [process for process, _ in pool._ranks], kept

    yield make
    for end in kept:
        end.close()


def tasks(count):
    return [SimpleNamespace(rank=rank) for rank in range(count)]


def test_a_rank_that_is_gone_before_its_task_comes(made):
    pool, processes, _ = made(False, True)
    with pytest.raises(RunError, match="DPA864 the process of rank 1 ended"):
        pool.run(tasks(2))
    assert all(process.did == ["kill", "join", "close"] for process in processes)
    assert pool._ranks == []


@pytest.mark.parametrize("error", [EOFError, ConnectionResetError])
def test_a_rank_that_ends_over_its_task(made, monkeypatch, error):
    class Connection:
        def send(self, task):
            pass

        def recv(self):
            raise error

        def close(self):
            pass

    pool, _, _ = made()
    pool._ranks = [(Process(), Connection())]
    monkeypatch.setattr(
        "dataproto_audit.trainer.compare.pool.wait", lambda found, timeout: list(found)
    )
    with pytest.raises(RunError, match="DPA864 the process of rank 0 ended"):
        pool.run(tasks(1))


def test_all_are_closed_where_the_first_is_gone(made):
    pool, processes, kept = made(True, False)
    pool.close()
    assert kept[1].recv() is None, "the second was told to end"
    assert all(process.did == ["join", "close"] for process in processes)
