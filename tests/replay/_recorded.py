"""Recordings of simulated steps, faulty and healthy."""

from dataclasses import replace

from dataproto_audit.replay.recording import Recording, piece_of
from dataproto_audit.testing.faults import CATALOGUE
from dataproto_audit.testing.faulty import faulty_step
from dataproto_audit.testing.healthy import boundaries
from dataproto_audit.testing.options import Options


def sides(name, **changed):
    """The recording with a fault, the healthy one beside it, and what the fault changed."""
    made = faulty_step(CATALOGUE[name], changed=changed)
    both = []
    for found, metrics in ((made.bad, made.bad_metrics), (made.good, made.good_metrics)):
        pieces = tuple(
            piece_of(b.batch, b.stage, when=b.when, evidence=b.evidence, step=step)
            for step, b in found
        )
        both.append(Recording(pieces, made.settings, metrics))
    return both[0], both[1], made.truth


def healthy(**options):
    """One healthy step."""
    chosen = Options(**options)
    pieces = tuple(
        piece_of(b.batch, b.stage, when=b.when, evidence=b.evidence, step=chosen.step)
        for b in boundaries(chosen)
    )
    return Recording(pieces, chosen.settings())


def lone(recording, stage, when="after"):
    """The batch of one boundary, as a file holds it."""
    [piece] = [p for p in recording.pieces if (p.stage, p.when) == (stage, when)]
    return Recording((replace(piece, stage=None, evidence={}),), recording.settings, lone=True)
