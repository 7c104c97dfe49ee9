import pytest

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.compare.layouts import parse_layouts


def parse(text):
    return parse_layouts(text, model="m")


def test_commas_separate_layouts_and_the_words_of_one():
    layouts = parse("fsdp:2,megatron:tp=2,pp=2,sp, fsdp:4+size=2,packed,")
    assert [layout.name for layout in layouts] == [
        "fsdp:2", "megatron:tp=2,pp=2,sp", "fsdp:4+size=2,packed",
    ]  # fmt: skip
    assert [layout.world for layout in layouts] == [2, 4, 4]
    assert [layout.data_parallel for layout in layouts] == [2, 1, 4]


def test_every_word_sets_what_it_names():
    (fsdp,) = parse("fsdp:4+ulysses=2+size=2+wrap=layer+reshard=0+packed+fused+tokens=64+bf16")
    assert (fsdp.strategy, fsdp.data_parallel, fsdp.dtype) == ("fsdp2", 2, "bfloat16")
    assert (fsdp.fsdp.sequence_parallel, fsdp.fsdp.fsdp_size, fsdp.fsdp.wrap) == (2, 2, "layer")
    assert fsdp.fsdp.reshard_after_forward is False
    assert (fsdp.fsdp.param_dtype, fsdp.model.dtype) == ("bfloat16", "float32")
    assert fsdp.model.remove_padding
    assert fsdp.model.fused_kernels
    assert (fsdp.micro.rows, fsdp.micro.max_tokens) == (0, 64)
    assert parse("fsdp:4+reshard=1")[0].fsdp.reshard_after_forward is True
    assert parse("fsdp:4+reshard=2")[0].fsdp.reshard_after_forward == 2
    text = "megatron:tp=2,pp=2,vpp=2,cp=2,dp=3,distopt=0,recompute=full,bf16"
    (megatron,) = parse(text)
    options = megatron.megatron
    assert (options.tp, options.pp, options.vpp, options.cp) == (2, 2, 2, 2)
    assert (options.distributed_optimizer, options.recompute) == (False, "full")
    assert (megatron.world, megatron.data_parallel) == (24, 3)
    assert megatron.model.dtype == "bfloat16"


def test_a_pipeline_gets_a_number_of_micro_batches_that_it_takes():
    assert parse("megatron:tp=2")[0].micro.divisible_by == 1
    open_size, given = parse("megatron:pp=2")[0].micro, parse("megatron:pp=2,rows=3")[0].micro
    assert (open_size.rows, open_size.divisible_by) == (0, 2)
    assert (given.rows, given.divisible_by) == (3, 1)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("ddp:2", "unknown layout 'ddp:2'.*fsdp: or megatron:"),
        ("2", "unknown layout '2'"),
        ("fsdp:2+tp=2", "unknown 'tp=2'.*ulysses"),
        ("fsdp:2+ulysses=x", "'ulysses=x' is no count"),
        ("fsdp:0", "no rank"),
        ("fsdp:99999", "99999 ranks, each of them a process.*64 ranks or fewer"),
        ("megatron:tp=8,pp=8,dp=2", "128 ranks"),
        ("megatron:tp=2,tp=4", "'tp=2' and 'tp=4' set the same"),
        ("fsdp:2+4", "'2' and '4' set the same"),
        ("fsdp:2+packed+packed=0", "'packed' and 'packed=0' set the same"),
        ("megatron:dp=2,dp=2", "'dp=2' and 'dp=2'"),
        ("fsdp:2+rows=2+tokens=60", "'rows=2' and 'tokens=60'"),
        ("fsdp:2+tokens=60+rows=2", "'tokens=60' and 'rows=2'"),
        ("megatron:tp=0", "'tp=0' is no count"),
        ("megatron:distopt=2", "Choose 0, 1"),
        ("fsdp:2+wrap=all", "Choose root, layer"),
        ("fsdp:2+packed=yes", "Choose no value, 0, 1"),
    ],
)
def test_what_is_no_layout_is_refused(text, fragment):
    with pytest.raises(UsageError, match=rf"DPA851 .*{fragment}"):
        parse(text)


def test_a_word_may_stand_in_each_layout():
    layouts = parse("fsdp:2+packed,megatron:tp=2+packed,fsdp:64")
    assert [layout.world for layout in layouts] == [2, 2, 64]


def test_a_switch_may_be_off():
    [on, off, plain] = parse("megatron:tp=2+sp+fused=1,megatron:tp=2+sp=0+packed=0,megatron:tp=2")
    assert on.megatron.sp
    assert on.model.fused_kernels
    assert not off.megatron.sp
    assert off.model == plain.model


def test_the_size_of_micro_batches_that_is_asked_for_counts_on_a_pipeline_too():
    asked, left = parse_layouts("megatron:pp=2+rows=2,megatron:pp=2", model="m")
    assert (asked.micro.rows, asked.micro.divisible_by) == (2, 1)
    assert (left.micro.rows, left.micro.divisible_by) == (0, 2)


def test_a_pipeline_in_order_takes_any_number_of_micro_batches_of_a_size():
    """As train does; only an interleaved one, and one without a size, wants multiples."""
    for text, multiple in (("rows=6", 1), ("rows=6,vpp=2", 2), ("tokens=60", 2), ("dp=1", 2)):
        (layout,) = parse(f"megatron:pp=2,{text}")
        assert layout.micro.divisible_by == multiple
    one, two = parse("fsdp:1,fsdp:2")
    assert (one.world, two.world) == (1, 2)
    for text in ("fsdp:\u00b2", "megatron:dp=\u00b2"):
        with pytest.raises(UsageError, match="DPA851"):
            parse(text)
