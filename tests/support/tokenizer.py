"""A small byte-level tokenizer.json, trained on this project's own words, with the markers of a chat template."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=1)
def make_tokenizer_json(vocab_size: int = 400) -> bytes:
    """Bytes of a tokenizer.json: 256 bytes, some merges, and <|im_start|>, <|im_end|>, <|endoftext|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = Path(__file__).parents[2] / "docs" / "glossary.md"
    tokenizer.train_from_iterator(words.read_text().splitlines(), trainer)
    return tokenizer.to_str().encode()
