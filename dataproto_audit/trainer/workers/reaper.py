"""A small process that clears up after Ray if the driver is killed.

After SIGKILL the driver cannot stop anything. The kernel ends Ray's daemons with it, but their
agents stay, and so does the session folder. The reaper knows them from the start and sleeps on a
pipe that only the driver holds open; when it closes, it gives processes time to go, kills the rest
and removes the folder. It costs nothing meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

PATIENCE_S = 8.0


def start_reaper(roots: Sequence[int], *, folder: str = "") -> subprocess.Popen[bytes]:
    """Watch over the processes ``roots`` and what they have started, and over ``folder``.

    Watching ends with this process; kill the reaper to call it off.
    """
    table = processes()
    known = [f"{pid}:{table[pid][1]}" for pid in sorted(_family(roots, table))]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, folder, *known],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def reap(known: Sequence[tuple[int, str]], patience_s: float = PATIENCE_S) -> None:
    """End ``known`` (process id, start time) and their descendants: by patience, then by force."""
    table = processes()
    living = [pid for pid, at in known if table.get(pid, (0, ""))[1] == at]
    left = {pid: table[pid][1] for pid in _family(living, table)}
    deadline = time.monotonic() + patience_s
    while left and time.monotonic() < deadline:
        time.sleep(0.25)
        now = processes()
        left = {pid: at for pid, at in left.items() if now.get(pid, (0, ""))[1] == at}
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)


def _family(roots: Sequence[int], table: Mapping[int, tuple[int, str]]) -> set[int]:
    """``roots`` that live, and their descendants."""
    chosen = {pid for pid in roots if pid in table}
    grown = bool(chosen)
    while grown:
        more = {pid for pid, (parent, _) in table.items() if parent in chosen} - chosen
        chosen |= more
        grown = bool(more)
    return chosen


def processes() -> dict[int, tuple[int, str]]:
    """Process id -> (parent's id, start time) of every live process."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    fields = file.read().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if fields[0] != "Z":
                found[int(name)] = (int(fields[1]), fields[19])
    return found


if __name__ == "__main__":
    sys.stdin.buffer.read()
    given = [argument.split(":") for argument in sys.argv[2:]]
    reap([(int(pid), at) for pid, at in given])
    if sys.argv[1]:
        shutil.rmtree(sys.argv[1], ignore_errors=True)
