import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from retrieve_spec.server.prompts import (
    FORMATS,
    FimAssembler,
    FimParts,
    find_format,
)
from retrieve_spec.server.sampling import Beginnings
from retrieve_spec.server.schemas import ExtraChunk
from retrieve_spec.server.text import TextCodec


def tiny(tokens, bos=None):
    """The codec of a byte-level tokenizer with some control tokens."""
    letters = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(letters, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(list(tokens))
    if bos:
        backend.post_processor = TemplateProcessing(f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))])
    return TextCodec(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos))


def of_family(family, **options):
    """An assembler for a model of a family."""
    fmt = next(fmt for fmt in FORMATS if fmt.family == family)
    codec = tiny([*fmt.needed, *(token for token in (fmt.repo, fmt.sep, *options.values()) if token)], **options)
    return FimAssembler(codec, find_format(codec), 4096, 1024)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: f"{fmt.family}:{fmt.prefix}")
def test_every_family_is_found_by_its_vocabulary(fmt):
    assert find_format(tiny([*fmt.needed, *(token for token in (fmt.repo, fmt.sep) if token)])).fmt is fmt


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (
            "qwen",
            "<|repo_name|>myproject\n<|file_sep|>a.py\nA<|file_sep|>filename\n"
            "<|fim_prefix|>pre<|fim_suffix|>post<|fim_middle|>",
        ),
        ("codegemma", "\n\n--- snippet ---\n\nA<|fim_prefix|>pre<|fim_suffix|>post<|fim_middle|>"),
        (
            "starcoder2",
            "<repo_name>myproject<file_sep>a.py\nA<file_sep><fim_prefix>filename\npre<fim_suffix>post<fim_middle>",
        ),
        ("deepseek", "\n\n--- snippet ---\n\nA<｜fim▁begin｜>pre<｜fim▁hole｜>post<｜fim▁end｜>"),
        ("codestral", "+++++ a.py\nA\n[SUFFIX]post[PREFIX]pre"),
        ("seed-coder", "\n\n--- snippet ---\n\nA<[fim-suffix]>post<[fim-prefix]>pre<[fim-middle]>"),
        ("glm", "\n\n--- snippet ---\n\nA<|code_prefix|>pre<|code_suffix|>post<|code_middle|>"),
    ],
)
def test_prompt_of_each_family(family, expected):
    assembler = of_family(family)
    prompt = assembler.assemble(FimParts("pre", "post", (ExtraChunk(text="A", filename="a.py"),)), 64)
    assert assembler.codec.decode(prompt.token_ids) == expected
    assert not prompt.truncated


def test_begin_of_text_stands_once_before_the_prefix_and_behind_the_chunks():
    assembler = of_family("codegemma", bos="<bos>")
    text = assembler.codec.decode(assembler.assemble(FimParts("p", "s", (ExtraChunk(text="A"),)), 64).token_ids)
    assert text.count("<bos>") == 1
    assert "A<bos><|fim_prefix|>p" in text


def test_control_tokens_in_code_stay_text(codec):
    found = find_format(codec)
    parts = FimParts("a<|fim_suffix|>b", "<|fim_middle|>", (ExtraChunk(text="<|file_sep|>", filename="<|repo_name|>"),))
    ids = FimAssembler(codec, found, 2048, 1024).assemble(parts, 64).token_ids
    assert [ids.count(token) for token in (found.suffix, found.middle, found.sep, found.repo)] == [1, 1, 2, 1]


def test_a_model_without_the_tokens_cannot_infill():
    for tokens in (["<|endoftext|>"], ["<fim_prefix>", "<fim_suffix>"]):
        assert find_format(tiny(tokens)) is None


def test_budgets_hold_and_the_latest_chunks_stay(codec):
    assembler = FimAssembler(codec, find_format(codec), 2048, 1024)
    code = "".join(f"    value_{i} = compute({i})\n" for i in range(2000))
    chunks = tuple(ExtraChunk(text=f"chunk_{i} = 1\n" * 40, filename=f"f{i}.py") for i in range(12))
    prompt = assembler.assemble(FimParts(code, code, chunks), 128)
    assert len(prompt.token_ids) < 2048 - 128
    assert prompt.truncated
    text = codec.decode(prompt.token_ids)
    assert "chunk_11" in text
    assert "chunk_0 " not in text
    assert text.rstrip().endswith("<|fim_middle|>")
    assert "value_1999 = compute(1999)\n<|fim_suffix|>    value_0" in text


def test_lines_near_the_cursor_stand_behind_the_suffix_and_what_was_begun_nowhere(codec):
    assembler = FimAssembler(codec, find_format(codec), 2048, 1024, beginnings=Beginnings(codec))
    code = "".join(f"value_{i * 7919 % 100} = compute({i})\n" for i in range(40))
    prompt = assembler.assemble(FimParts(code + "    retur", "\nprint()\n"), 64)
    before, behind = (codec.decode(prompt.token_ids) + prompt.begun).split("<|fim_suffix|>")
    suffix, middle = behind.split("<|fim_middle|>")
    assert prompt.begun == " retur"
    assert suffix == "\nprint()\n"
    assert before.split("<|fim_prefix|>")[1] + middle == code + "    retur"
    assert 96 < len(middle) <= 768 + len("    retur")
    assert codec.decode(prompt.context_ids).endswith(middle.removesuffix(prompt.begun))
