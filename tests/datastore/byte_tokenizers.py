"""A tokenizer with one token per byte, made without a download."""

from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel


def byte_tokenizer(offset: int = 0, pad: int = 0) -> Tokenizer:
    """One token per byte; ids start at `offset`, and `pad` unused ids follow."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i + offset for i, piece in enumerate(alphabet)}
    vocabulary |= {f"<unused{i}>": offset + len(alphabet) + i for i in range(pad)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevel()
    return tokenizer
