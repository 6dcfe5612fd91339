"""Export the bundled reference model, or one like it, to a GGUF file for llama.cpp: float32 weights and the tokenizer.

A model like it is a Llama with a byte-level BPE that divides words as Qwen2's does; for others use llama.cpp's own
`convert_hf_to_gguf.py`. Needs the `gguf` package, and no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, GGUFWriter, Keys, LlamaFileType, SpecialVocab, TokenType, get_tensor_name_map
from numpy.typing import NDArray
from safetensors import deserialize

REFERENCE = Path(__file__).resolve().parent.parent / "retrieve_spec" / "reference"
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


def export(source: Path, target: Path) -> None:
    """Write the GGUF file of a model in a folder.

    Raises
    ------
    SystemExit
        The model, or its tokenizer, is of another kind.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    rope = config.get("rope_parameters") or {}
    kind = config["model_type"], rope.get("rope_type", "default"), tokenizer["model"]["type"]
    if kind != ("llama", "default", "BPE") or _words(tokenizer) != WORDS:
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
        for name, stored in deserialize(path.read_bytes()):
            short = names.get_name(name, try_suffixes=(".weight", ".bias"))
            weights = _float32(stored)
            part = short.split(".")[-2]
            writer.add_tensor(short, _interleaved(weights, rotated[part]) if part in rotated else weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _words(tokenizer: dict[str, Any]) -> str | None:
    for part in (tokenizer["pre_tokenizer"] or {}).get("pretokenizers", ()):
        if part["type"] == "Split":
            return str(part["pattern"].get("Regex"))
    return None


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


def _float32(stored: dict[str, Any]) -> NDArray[np.float32]:
    """A tensor's values; a bfloat16 is the upper half of a float32."""
    if stored["dtype"] == "BF16":
        bits = np.frombuffer(stored["data"], np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(stored["shape"])
    kinds = {"F32": np.float32, "F16": np.float16}
    return np.frombuffer(stored["data"], kinds[stored["dtype"]]).astype(np.float32).reshape(stored["shape"])


def _interleaved(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a projection in llama.cpp's order: of each head, the two halves that are turned together alternate."""
    halves = weights.reshape(heads, 2, -1, weights.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weights.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="the GGUF file to write")
    parser.add_argument("--model", type=Path, default=REFERENCE, help="folder of the model (default: the bundled one)")
    args = parser.parse_args()
    export(args.model, args.target)


if __name__ == "__main__":
    main()
