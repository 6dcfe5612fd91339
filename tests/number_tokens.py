"""A tokenizer with one token per number."""

from tokenizers import Tokenizer, models, pre_tokenizers


def number_tokenizer(size=1000):
    """One token per number."""
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(size)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer
