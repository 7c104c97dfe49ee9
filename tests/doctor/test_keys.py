"""Keys that came in by ``+``, by composing, and by verl's experimental trainers."""

import pytest

from dataproto_audit.doctor import examine


def told(file, *overrides, version="0.7.1"):
    problems = examine(str(file), overrides, verl=version)["problems"]
    return [(p["level"], p["text"].split(",")[0].rstrip(".")) for p in problems
            if p["code"] == "DPA850"]  # fmt: skip


def test_what_a_plus_adds_is_known_whole(file):
    """The line of docs/doctor.md."""
    assert told(file, "data.train_batch_size=256", "+a.b=c", "~critic") == []
    assert told(file, "+a.b.c=1", "++a.b.d=2") == []


def test_what_stands_beside_it_is_not(file):
    assert told(file, "+a.b=c", "a.d=1") == [("fail", "verl 0.7.1 has no key a.d")]
    assert told(file, "a.b=1") == [("fail", "verl 0.7.1 has no key a")]


@pytest.mark.parametrize("version", ["0.7.1", "0.9.1"])
def test_the_choice_of_engine_is_no_unknown_key(file, version):
    """Composing writes it at the top."""
    assert told(file, "model_engine=dp", version=version) == []
    file.write_text(file.read_text() + "model_engine: dp\n")
    assert told(file, version=version) == []


def test_keys_of_the_experimental_trainers_are_known_in_theirs_only(file, tmp_path):
    assert told(file, "rollout.n=8") == [("fail", "verl 0.7.1 has no key rollout")]
    apart = tmp_path / "apart.yaml"
    apart.write_text(
        f"{file.read_text()}rollout: {{nnodes: 1, n_gpus_per_node: 8}}\n"
        "async_training: {staleness_threshold: 0.1}\n"
    )
    key = "actor_rollout_ref.actor.use_rollout_log_probs"
    assert told(apart, f"{key}=True", "rollout.n=8") == []
    assert told(file, f"{key}=True") == [("fail", f"verl 0.7.1 has no key {key}")]
