"""CPU seconds of a run and its processes."""

import time
from pathlib import Path

from dataproto_audit.integrations.cpu import CpuClock, processes, with_descendants


def stat(folder: Path, process: int, name: str, parent: int, user: int, system: int) -> None:
    (folder / str(process)).mkdir()
    rest = ["S", str(parent), *["0"] * 9, str(user), str(system), "0", "0"]
    (folder / str(process) / "stat").write_text(f"{process} ({name}) {' '.join(rest)}\n")


def test_what_came_of_a_process_counts_with_it(tmp_path: Path) -> None:
    stat(tmp_path, 1, "init", 0, 100, 0)
    stat(tmp_path, 5, "ray let) (x", 1, 200, 100)  # names may hold brackets and spaces
    stat(tmp_path, 6, "worker", 5, 300, 0)
    stat(tmp_path, 7, "server", 6, 0, 400)
    stat(tmp_path, 8, "other", 1, 900, 0)
    (tmp_path / "9").mkdir()  # ended while we looked
    known = processes(tmp_path)
    assert {process: parent for process, (parent, _) in known.items()} == {
        1: 0, 5: 1, 6: 5, 7: 6, 8: 1,
    }  # fmt: skip
    per_tick = known[5][1] / 300
    found = {process: round(s / per_tick) for process, s in with_descendants(known, 5).items()}
    assert found == {5: 300, 6: 300, 7: 400}
    assert with_descendants(known, 77) == {}


def test_this_process_alone_counts_without_ray() -> None:
    clock = CpuClock()
    end = time.process_time() + 0.02
    while time.process_time() < end:
        pass
    assert clock.spent_s() >= 0.02
