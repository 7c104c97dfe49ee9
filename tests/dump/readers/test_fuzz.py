"""A fixed sample of damaged files: each is read or explained."""

from dataproto_audit.testing.fuzz import MEMORY_FACTOR, MEMORY_FREE, attempt, fuzz, seeds_of
from dataproto_audit.testing.log_files import console_text, event_file, wandb_file
from dataproto_audit.testing.mutations import mutants

STEPS = [{"step": i, "actor/grad_norm": 0.1 * i} for i in range(9)]
INPUTS = 2000


def seeds(samples):
    files = (p for p in samples.rglob("*") if p.suffix not in (".md", ".txt"))
    logs = [
        ("events.out.tfevents.1", event_file(STEPS)),
        ("run-1.wandb", wandb_file(STEPS)),
        ("log", console_text(STEPS).encode()),
    ]
    return [*seeds_of(files), *logs]


def test_damaged_files_are_read_or_explained(samples, tmp_path):
    found = fuzz(mutants(seeds(samples), INPUTS, seed=0), tmp_path)
    assert found.faults == []
    assert found.inputs == INPUTS
    assert found.read > 50
    assert set(found.explained) >= {"DPA810", "DPA811", "DPA812", "DPA857"}
    assert found.grown < MEMORY_FREE + MEMORY_FACTOR * (1 << 16)
    assert list(tmp_path.iterdir()) == []


def test_the_same_seed_gives_the_same_inputs(samples):
    made = [list(mutants(seeds(samples), 20, seed=s)) for s in (3, 3, 4)]
    assert made[0] == made[1] != made[2]
    assert len({mutant.data for mutant in made[0]}) == 20


def test_what_is_no_explanation_is_a_fault(tmp_path, monkeypatch):
    (tmp_path / "mutant").write_bytes(b"\x80\x04N.")
    assert attempt(tmp_path / "mutant") == "DPA810"

    def broken(path):
        raise RuntimeError("oops")

    monkeypatch.setattr("dataproto_audit.testing.fuzz.read_batches", broken)
    assert attempt(tmp_path / "mutant") == "RuntimeError: oops"
