"""A tiny model with the byte tokenizer, saved as a folder."""

import torch
from byte_tokenizers import byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def save_model(folder, seed=0, hidden=16, layers=2):
    """Write a random Llama of one head; its weights depend on the seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()).save_pretrained(folder)
    return str(folder)
