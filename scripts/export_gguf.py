"""Export the bundled reference model, or one like it, to a GGUF file for llama.cpp: float32 weights and the tokenizer.

A model like it is a Llama with a byte-level BPE that divides words as Qwen2's does; for others use llama.cpp's own
`convert_hf_to_gguf.py`. Needs the `gguf` package.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, GGUFWriter, Keys, LlamaFileType, SpecialVocab, TokenType, get_tensor_name_map
from harness import ROOT, arguments
from numpy.typing import NDArray
from safetensors.torch import load_file

REFERENCE = ROOT / "retrieve_spec" / "reference"
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How text is divided before it is encoded; llama.cpp knows it by the name qwen2."""
SPECIAL = {
    "fim_pre": "<|fim_prefix|>",
    "fim_suf": "<|fim_suffix|>",
    "fim_mid": "<|fim_middle|>",
    "fim_pad": "<|fim_pad|>",
    "fim_rep": "<|repo_name|>",
    "fim_sep": "<|file_sep|>",
}


def main() -> None:
    """Export the model in a folder (the bundled one by default) to a file."""
    args = arguments(__doc__, "target", model=REFERENCE)
    export(args.model, args.target)


def export(source: Path, target: str) -> None:
    """Export the model in a folder to a file; models of other kinds are an error."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    rope = config.get("rope_parameters") or {}
    kind = config["model_type"], rope.get("rope_type", "default"), tokenizer["model"]["type"]
    parts = (tokenizer["pre_tokenizer"] or {}).get("pretokenizers", ())
    words = [part["pattern"].get("Regex") for part in parts if part["type"] == "Split"]
    if kind != ("llama", "default", "BPE") or words[:1] != [WORDS]:
        sys.exit(
            f"expected a Llama whose tokenizer divides words as Qwen2's does, got {kind}. Use llama.cpp's converter."
        )
    writer = GGUFWriter(target, "llama")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    writer.add_name(source.name)
    writer.add_file_type(LlamaFileType.ALL_F32)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _add_tokenizer(writer, tokenizer, config["vocab_size"])
    SpecialVocab(source, load_merges=True).add_to_gguf(writer, quiet=True)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    rotated = {"attn_q": heads, "attn_k": config["num_key_value_heads"]}
    for path in sorted(source.glob("*.safetensors")):
        for name, stored in load_file(path).items():
            short = names.get_name(name, try_suffixes=(".weight", ".bias"))
            weights, part = stored.float().numpy(), short.split(".")[-2]
            writer.add_tensor(short, _interleaved(weights, rotated[part]) if part in rotated else weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: GGUFWriter, tokenizer: dict[str, Any], size: int) -> None:
    """Add pieces and the special tokens of filling in; ids that no piece has get a name that no text says."""
    pieces = [f"[PAD{i}]" for i in range(size)]
    types = [TokenType.UNUSED] * size
    for piece, i in tokenizer["model"]["vocab"].items():
        pieces[i], types[i] = piece, TokenType.NORMAL
    for token in tokenizer["added_tokens"]:
        pieces[token["id"]] = token["content"]
        types[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(pieces)
    writer.add_token_types(types)
    writer.add_add_bos_token(False)
    known = {piece: i for i, piece in enumerate(pieces)}
    for role, piece in SPECIAL.items():
        if piece in known:
            writer.add_uint32(getattr(Keys.Tokenizer, f"{role.upper()}_ID"), known[piece])


def _interleaved(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a projection in llama.cpp's order: of each head, the two halves that are turned together alternate."""
    halves = weights.reshape(heads, 2, -1, weights.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weights.shape)


if __name__ == "__main__":
    main()
