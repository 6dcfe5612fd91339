"""A tiny model with the byte tokenizer, in memory and as a folder."""

import torch
from byte_tokenizers import byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def llama(vocabulary=256, seed=0, hidden=16):
    """A random Llama; its weights depend on the seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def save_model(folder, seed=0, hidden=16):
    """Write one with the byte tokenizer; returns its place."""
    llama(seed=seed, hidden=hidden).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()).save_pretrained(folder)
    return str(folder)
