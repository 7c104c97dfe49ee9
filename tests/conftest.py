"""Settings for all tests, and the checks that they leave no process and no file behind."""

import os
import sys
import uuid
from types import SimpleNamespace

# Before torch is imported anywhere: two OpenMP threads on two busy cores wait for each other, and
# float sums must not depend on the machine. The rest keeps engines quiet and off the network.
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}.items():
    os.environ.setdefault(_name, _value)

# Inherited by every process that a test starts, however deep, also after its parent has died.
_MARK = "DATAPROTO_AUDIT_TEST_SESSION"
os.environ[_MARK] = uuid.uuid4().hex

from collections.abc import Iterator  # noqa: E402

import psutil  # noqa: E402
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

_QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", derandomize=True, max_examples=25, **_QUIET)
settings.register_profile("dev", max_examples=100, **_QUIET)
settings.register_profile("nightly", max_examples=2000, print_blob=True, **_QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Python's own helper of `multiprocessing`, one per process until it exits.
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def _descendants() -> set[psutil.Process]:
    """Processes that this test session started and that still run, orphans included."""
    own = psutil.Process()
    found = set(own.children(recursive=True))
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == os.environ[_MARK]:
                found.add(process)
        except psutil.Error:
            continue  # ended meanwhile, or another user's
    return {p for p in found - {own} if _is_running(p)}


def _is_running(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
        return process.status() != psutil.STATUS_ZOMBIE and not any(h in command for h in _HELPERS)
    except psutil.Error:
        return False


def _assert_none_left(before: set[psutil.Process], grace_s: float) -> None:
    """Fail with the command lines of what still runs after ``grace_s`` seconds, and end it."""
    left = _descendants() - before
    if left:
        _, alive = psutil.wait_procs(left, timeout=grace_s)
        left = {p for p in alive if _is_running(p)}
    described = []
    for process in left:
        try:
            described.append(f"{process.pid}: {' '.join(process.cmdline())[:200]}")
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=10)
    assert not described, "processes left running:\n" + "\n".join(described)


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_written_beside_the_sources(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests write into folders of their own: a relative path of one must not end up here."""
    root = request.config.rootpath
    before = {path.name for path in root.iterdir()}
    yield
    new = {path.name for path in root.iterdir()} - before
    left = sorted(name for name in new if not name.startswith("."))  # caches, coverage
    assert not left, f"tests wrote into the working directory: {left}"


@pytest.fixture
def no_leftover_processes() -> Iterator[None]:
    """Nothing that the test started runs after it; ask for it before any engine fixture."""
    before = _descendants()
    yield
    _assert_none_left(before, grace_s=20)


@pytest.fixture(scope="module", autouse=True)
def _engine_modules_leave_no_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """The same for each module with engine tests, whose fixtures may share one cluster."""
    engines = any(
        item.path == request.path and item.get_closest_marker("engine")
        for item in request.session.items
    )
    before = _descendants() if engines else set()
    yield
    if engines:
        _assert_none_left(before, grace_s=20)


@pytest.fixture
def call(monkeypatch, capsys):
    """``call(*args, check=CODE)`` runs the command line in this process."""
    from dataproto_audit import cli

    def run(*args, check=0):
        monkeypatch.setattr(sys, "argv", ["dataproto-audit", *map(str, args)])
        code = 0
        try:
            cli.main()
        except SystemExit as stopped:
            code = stopped.code or 0
        out, err = capsys.readouterr()
        assert code == check, err
        assert "Traceback" not in err
        return SimpleNamespace(stdout=out, stderr=err)

    return run
