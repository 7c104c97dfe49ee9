"""A model, a tokenizer and data for a run that takes seconds: ``python toy.py FOLDER [uneven]``.

With ``uneven`` the first two prompts of every four are the longest that fit.

transformers 5 takes any folder of this model for a byte-level tokenizer, so it is one.
"""

import random
import string
import sys
from pathlib import Path

import pandas as pd
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForTokenClassification,
)

LONG = 20
"""Letters of the longest question: with the template 39 tokens, of 40 that may be."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """One id for each character."""
    special = ["<pad>", "<|im_start|>", "<|im_end|>", "<unk>"]
    letters = "\u010a\u0120" + string.digits + string.ascii_lowercase + "+-*/=?.,:"
    vocab = {token: i for i, token in enumerate([*special, *letters])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<|im_end|>", unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
    )  # fmt: skip
    made.chat_template = TEMPLATE
    return made


def config(tok: PreTrainedTokenizerFast, **more) -> Qwen2Config:
    """Two layers."""
    return Qwen2Config(
        vocab_size=len(tok), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        pad_token_id=tok.pad_token_id, eos_token_id=tok.eos_token_id, bos_token_id=None,
        tie_word_embeddings=False, **more,
    )  # fmt: skip


def model(tok: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """With random weights."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config(tok))


def critic(tok: PreTrainedTokenizerFast) -> Qwen2ForTokenClassification:
    """The same with one value for each token, which the engine's critic of 0.7.1 has to be given:
    of a language model it takes logits for values."""
    torch.manual_seed(0)
    return Qwen2ForTokenClassification(config(tok, num_labels=1))


def rows(count: int, seed: int, *, uneven: bool = False) -> pd.DataFrame:
    """Sums, in verl's columns."""
    draw = random.Random(seed)
    made = []
    for index in range(count):
        a, b = draw.randrange(10 ** draw.randint(1, 4)), draw.randrange(100)
        said = f"{a}+{b}=?"
        said = said.rjust(LONG, "0") if uneven and index % 4 < 2 else said
        made.append(
            {
                "data_source": "toy",
                "prompt": [{"role": "user", "content": said}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(a + b)},
                "extra_info": {"index": index, "split": "train"},
            }
        )
    return pd.DataFrame(made)


def main(folder: Path, *, uneven: bool) -> None:
    """Write ``model/``, ``critic/``, ``train.parquet`` and ``val.parquet``."""
    tok = tokenizer()
    model(tok).save_pretrained(folder / "model")
    critic(tok).save_pretrained(folder / "critic")
    for name in ("model", "critic"):
        tok.save_pretrained(folder / name)
    rows(16, 1, uneven=uneven).to_parquet(folder / "train.parquet")
    rows(4, 2).to_parquet(folder / "val.parquet")


if __name__ == "__main__":
    main(Path(sys.argv[1]), uneven="uneven" in sys.argv[2:])
