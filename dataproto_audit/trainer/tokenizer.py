"""Tokenizers: the character tokenizer of the tiny model, and those of Hugging Face folders.

The driver uses the small ``tokenizers`` library where that is exact; ``transformers`` is imported
only for chat templates and for folders whose tokenizer needs Python code of its own.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dataproto_audit.codes import UsageError
from dataproto_audit.trainer.model_config import TOKENS, load_json

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>")
CHARSETS = {
    "digits": string.digits + "+-=",
    "ascii": string.digits + string.ascii_letters + string.punctuation + " \n",
    "arithmetic": string.digits + "+-*/=() " + string.ascii_lowercase,
}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
#: Tokenizer classes that add nothing to ``tokenizer.json``, so ``tokenizers`` alone is exact.
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


class Tokenizer:
    """Encode, decode and chat templates, with ids of the special tokens.

    ``stop_ids`` holds every id that ends a response: the tokenizer's end token and those of
    ``generation_config.json``. ``pad_id`` falls back to ``eos_id``, as trainers usually do.
    """

    def __init__(
        self, folder: Path, *, backend: Any, plain: bool, special: Mapping[str, int | None]
    ) -> None:
        self.folder = folder
        self.charset: frozenset[str] | None = None
        """Characters of a character tokenizer; None for others."""
        self._backend = backend
        self._plain = plain
        self._chat: Any = None
        eos_id = special["eos_token_id"]
        if eos_id is None:
            raise UsageError(
                "DPA852",
                f"{folder}: the tokenizer has no end-of-sequence token.",
                "Set eos_token in tokenizer_config.json.",
            )
        self.eos_id: int = eos_id
        pad_id, self.bos_id = special["pad_token_id"], special["bos_token_id"]
        self.pad_id: int = eos_id if pad_id is None else pad_id
        self.unk_id = special["unk_token_id"]
        self.stop_ids = _stop_ids(folder, eos_id)

    def __len__(self) -> int:
        """Return the number of tokens, special ones included."""
        return self._backend.get_vocab_size() if self._plain else len(self._backend)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of ``text``; ``special`` adds what the tokenizer puts around a text (BOS)."""
        return self.encode_batch([text], special=special)[0]

    def encode_batch(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """Token ids of each text."""
        if self._plain:
            encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=special)
            return [item.ids for item in encoded]
        return [
            list(ids) for ids in self._backend(list(texts), add_special_tokens=special)["input_ids"]
        ]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of ``ids``; ids beyond the vocabulary decode to nothing."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special))

    def decode_batch(
        self, rows: Sequence[Sequence[int]], *, skip_special: bool = True
    ) -> list[str]:
        """Text of each row of ids."""
        if self._plain:
            texts = self._backend.decode_batch(
                [list(row) for row in rows], skip_special_tokens=skip_special
            )
            return [str(text) for text in texts]
        return [self.decode(row, skip_special=skip_special) for row in rows]

    def unknown_in(self, text: str) -> list[str]:
        """Characters of ``text`` that a character tokenizer does not know."""
        return sorted(set(text) - self.charset) if self.charset is not None else []

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation through the folder's chat template, ready for the answer.

        UsageError DPA852 if the folder has no template or the template refuses the messages.
        """
        chat = self._chat_backend()
        try:
            text = chat.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise jinja2 errors of their own choice
            raise UsageError(
                "DPA852",
                f"{self.folder}: the chat template failed ({type(error).__name__}: {error}).",
                "Mend the messages, or set data.apply_chat_template=false.",
            ) from error
        return self.encode(str(text), special=False)

    def _chat_backend(self) -> Any:
        if self._chat is None:
            self._chat = _auto_tokenizer(self.folder) if self._plain else self._backend
            if not self._chat.chat_template:
                raise UsageError(
                    "DPA852",
                    f"{self.folder}: the tokenizer has no chat template.",
                    "Set data.apply_chat_template=false, or add a chat_template.",
                )
        return self._chat


def load_tokenizer(folder: Path, model_config: Mapping[str, Any] | None = None) -> Tokenizer:
    """Open the tokenizer of a folder; UsageError DPA852 if it cannot be read."""
    config = _read_json(folder / "tokenizer_config.json")
    if config.get("tokenizer_class") in PLAIN_CLASSES and (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer as Backend

        try:
            backend = Backend.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception
            raise UsageError(
                "DPA852",
                f"{folder / 'tokenizer.json'}: not readable ({error}).",
                "Save the tokenizer again with save_pretrained.",
            ) from error
        ids = {f"{name}_id": _id_of(backend, config.get(name)) for name in _SPECIAL}
        tokenizer = Tokenizer(folder, backend=backend, plain=True, special=ids)
        if isinstance(config.get(_CHARSET_KEY), str):
            tokenizer.charset = frozenset(config[_CHARSET_KEY])
        return tokenizer
    backend = _auto_tokenizer(folder)
    ids = {f"{name}_id": getattr(backend, f"{name}_id") for name in _SPECIAL}
    if ids["eos_token_id"] is None and model_config is not None:
        eos_id = model_config.get("eos_token_id")
        ids["eos_token_id"] = next(iter(eos_id), None) if isinstance(eos_id, list) else eos_id
    return Tokenizer(folder, backend=backend, plain=False, special=ids)


_CHARSET_KEY = "character_set"
_SPECIAL = ("pad_token", "bos_token", "eos_token", "unk_token")


def _auto_tokenizer(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UsageError(
            "DPA858",
            f"transformers is needed for the tokenizer in {folder} ({error}).",
            'Install it: pip install "dataproto-audit[trainer]".',
        ) from error
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # a broken folder raises almost anything
        raise UsageError(
            "DPA852",
            f"{folder}: the tokenizer cannot be loaded ({type(error).__name__}: {error}).",
            "Save the tokenizer there with save_pretrained.",
        ) from error


def write_char_tokenizer(folder: Path, charset: str, *, max_length: int) -> dict[str, int]:
    """Write a character tokenizer; returns ``vocab_size`` and the ids of pad, bos and eos.

    Byte-pair encoding without merges splits into characters, newlines included. Encoding a text
    with special tokens puts BOS in front; characters outside the set become ``<unk>``.
    """
    from tokenizers import AddedToken, decoders, models, processors
    from tokenizers import Tokenizer as Backend

    characters = sorted(set(CHARSETS.get(charset, charset)))
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *characters))}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    backend.decoder = decoders.Fuse()
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": PLAIN_CLASSES[0],
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "additional_special_tokens": list(SPECIAL_TOKENS[4:]),
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        _CHARSET_KEY: "".join(characters),
    }
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    names = {"pad_token_id": "<pad>", "bos_token_id": "<bos>", "eos_token_id": "<eos>"}
    return {"vocab_size": len(vocab), **{key: vocab[token] for key, token in names.items()}}


def _id_of(backend: Any, token: Any) -> int | None:
    """Id of a token that tokenizer_config.json gives as a string or as {"content": ...}."""
    text = token.get("content") if isinstance(token, dict) else token
    found = backend.token_to_id(text) if isinstance(text, str) else None
    return None if found is None else int(found)


def _stop_ids(folder: Path, eos_id: int) -> tuple[int, ...]:
    file = folder / "generation_config.json"
    extra = _read_json(file).get("eos_token_id")
    if not TOKENS.holds(extra):
        raise UsageError(
            "DPA852",
            f"{file}: eos_token_id must be {TOKENS.words}.",
            "Save it again, or take it out.",
        )
    more = extra if isinstance(extra, list) else [] if extra is None else [extra]
    return tuple(sorted({eos_id, *more}))


def _read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object; {} if the file is absent, UsageError DPA852 if it is not JSON."""
    if not path.is_file():
        return {}
    try:
        value = load_json(path)
    except ValueError as error:
        raise UsageError("DPA852", f"{path}: not readable ({error}).", "Save it again.") from None
    return value if isinstance(value, dict) else {}
