"""What a layout is refused for is said in the words that the command takes."""

import pytest

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.compare.layouts import parse_layouts
from dataproto_audit.trainer.compare.run import check


@pytest.mark.parametrize(
    ("text", "rows", "said"),
    [
        ("megatron:tp=3", 8, "tp: 4 attention heads"),
        ("megatron:pp=3", 9, "pp: 2 layers"),
        ("megatron:tp=1,sp", 8, "sp: .* tp to 2 or more"),
        ("megatron:tp=2,cp=2,packed", 8, "packed packs rows, and .*cp=2"),
        ("megatron:pp=2,rows=8", 8, "pp: 1 micro-batches.* Set rows to 4 or less"),
        ("megatron:pp=2,rows=1", 1, "pp: .* 2 rows or more .--rows."),
        ("fsdp:4+ulysses=3+packed", 8, "ulysses=3 does not divide 4 ranks"),
        ("fsdp:2+ulysses=2", 8, "ulysses=2 shares packed rows .*Set packed"),
        ("fsdp:4+size=3", 8, "size=3 does not divide"),
        ("fsdp:4+wrap=layer+reshard=3", 8, "reshard=3 is no part"),
    ],
)
def test_refusals_name_words_and_no_keys(tiny_model, text, rows, said):
    (layout,) = parse_layouts(text, model=str(tiny_model()))
    with pytest.raises(UsageError, match=f"layout '.*{said}") as caught:
        check(layout, rows=rows)
    for key in ("actor_rollout_ref", "trainer.", "_parallel_size", "ppo_"):
        assert key not in str(caught.value)
