"""A model, a tokenizer and data for a run that takes seconds: ``python toy.py FOLDER``.

transformers 5 takes any folder of this model for a byte-level tokenizer, so it is one.
"""

import random
import string
import sys
from pathlib import Path

import pandas as pd
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

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


def model(tok: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Two layers with random weights."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tok), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
            pad_token_id=tok.pad_token_id, eos_token_id=tok.eos_token_id, bos_token_id=None,
            tie_word_embeddings=False,
        )
    )  # fmt: skip


def rows(count: int, seed: int) -> pd.DataFrame:
    """Sums, in verl's columns."""
    draw = random.Random(seed)
    made = []
    for index in range(count):
        a, b = draw.randrange(10 ** draw.randint(1, 4)), draw.randrange(100)
        made.append(
            {
                "data_source": "toy",
                "prompt": [{"role": "user", "content": f"{a}+{b}=?"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(a + b)},
                "extra_info": {"index": index, "split": "train"},
            }
        )
    return pd.DataFrame(made)


def main(folder: Path) -> None:
    """Write ``model/``, ``train.parquet`` and ``val.parquet``."""
    tok = tokenizer()
    model(tok).save_pretrained(folder / "model")
    tok.save_pretrained(folder / "model")
    rows(16, 1).to_parquet(folder / "train.parquet")
    rows(4, 2).to_parquet(folder / "val.parquet")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
