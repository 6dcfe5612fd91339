"""Fill-in-the-middle formats: which one a model was trained on, by its vocabulary and never by its name.

A row of the table applies when every token it names is exactly one entry of the vocabulary. Sources are the model cards
of the families and llama.cpp's table of spellings.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from retrieve_spec.server.text import TextCodec


@dataclass(frozen=True, slots=True)
class FimFormat:
    """How one family of models spells fill-in-the-middle.

    Attributes
    ----------
    family
        Name shown to users.
    prefix, suffix, middle
        Control tokens; ``middle`` may be absent (Codestral).
    repo, sep
        Control tokens of repository-level packing, where the family has it.
    end
        Further tokens that end a completion.
    requires
        Tokens that tell this family from others with the same spelling.
    suffix_first
        The suffix comes before the prefix.
    path_inside
        The path of the current file stands behind the prefix token instead of before it (StarCoder2).
    sections
        Other files are written as ``+++++ path`` sections (Codestral).
    """

    family: str
    prefix: str
    suffix: str
    middle: str | None
    repo: str | None = None
    sep: str | None = None
    end: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    suffix_first: bool = False
    path_inside: bool = False
    sections: bool = False

    @property
    def needed(self) -> tuple[str, ...]:
        """Every token the vocabulary must hold."""
        core = (self.prefix, self.suffix) + ((self.middle,) if self.middle else ())
        return core + self.requires

    def spells(self, prompt: str) -> bool:
        """Whether a prompt is made of these tokens: it ends with the middle's, or begins with the suffix's."""
        prefix, suffix = self.prefix.lstrip("▁"), self.suffix.lstrip("▁")
        if self.middle is None:
            return prompt.lstrip().startswith(suffix) and prefix in prompt
        return prompt.rstrip().endswith(self.middle.lstrip("▁")) and prefix in prompt and suffix in prompt


_PIPE = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
_STAR = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
_DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")

FORMATS: tuple[FimFormat, ...] = (
    FimFormat(
        "qwen",
        *_PIPE,
        repo="<|repo_name|>",
        sep="<|file_sep|>",
        requires=("<|file_sep|>",),
        end=("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|im_end|>", "<|endoftext|>"),
    ),
    FimFormat("codegemma", *_PIPE, requires=("<|file_separator|>",), end=("<|file_separator|>", *_PIPE, "<eos>")),
    FimFormat("granite", *_PIPE, requires=("<|end_of_text|>",), end=("<|end_of_text|>", "<|fim_pad|>")),
    FimFormat("fim", *_PIPE, end=("<|fim_pad|>", "<|endoftext|>", "<|im_end|>")),
    FimFormat("santacoder", "<fim-prefix>", "<fim-suffix>", "<fim-middle>", end=("<fim-pad>", "<|endoftext|>")),
    FimFormat(
        "starcoder2",
        *_STAR,
        repo="<repo_name>",
        sep="<file_sep>",
        requires=("<file_sep>", "<repo_name>"),
        end=("<file_sep>", "<fim_pad>", "<repo_name>", "<|endoftext|>"),
        path_inside=True,
    ),
    FimFormat("starcoder", *_STAR, end=("<|endoftext|>", "<fim_pad>", "<file_sep>")),
    FimFormat("deepseek", *_DEEPSEEK, end=("<｜end▁of▁sentence｜>", "<|EOT|>")),
    FimFormat("codellama", "▁<PRE>", "▁<SUF>", "▁<MID>", end=("▁<EOT>", "</s>")),
    FimFormat("codellama", "<PRE>", "<SUF>", "<MID>", end=("<EOT>", "</s>")),
    FimFormat("codestral", "[PREFIX]", "[SUFFIX]", None, end=("</s>",), suffix_first=True, sections=True),
    FimFormat("glm", "<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", end=("<|endoftext|>", "<|user|>")),
    FimFormat(
        "seed-coder",
        "<[fim-prefix]>",
        "<[fim-suffix]>",
        "<[fim-middle]>",
        end=("<[end▁of▁sentence]>",),
        suffix_first=True,
    ),
    FimFormat("falcon", "<|prefix|>", "<|suffix|>", "<|middle|>", end=("<|endoftext|>",)),
)


@dataclass(frozen=True, slots=True)
class FimVocabulary:
    """A format bound to one vocabulary: its control tokens as ids."""

    fmt: FimFormat
    prefix: int
    suffix: int
    middle: int | None
    repo: int | None
    sep: int | None
    bos: int | None
    end: frozenset[int] = field(default_factory=frozenset)


def find_format(codec: TextCodec) -> FimVocabulary | None:
    """The first format of the table whose tokens the vocabulary holds, None for a model that cannot infill."""
    for fmt in FORMATS:
        if any(codec.token_id(token) is None for token in fmt.needed):
            continue

        def known(token: str | None) -> int | None:
            return None if token is None else codec.token_id(token)

        end = {i for i in map(known, fmt.end) if i is not None}
        end |= {i for i in map(known, (fmt.repo, fmt.sep)) if i is not None}
        prefix, suffix = known(fmt.prefix), known(fmt.suffix)
        assert prefix is not None
        assert suffix is not None
        repo, sep = known(fmt.repo), known(fmt.sep)
        return FimVocabulary(fmt, prefix, suffix, known(fmt.middle), repo, sep, _bos(codec), frozenset(end))
    return None


def unknown_format(codec: TextCodec, prompt: str) -> bool:
    """Whether a prompt is spelled in a fill-in-the-middle format, and in none whose tokens the vocabulary holds."""
    spelled = [fmt for fmt in FORMATS if fmt.spells(prompt)]
    return bool(spelled) and all(
        any(codec.token_id(token) is None for token in (fmt.prefix, fmt.suffix, fmt.middle) if token) for fmt in spelled
    )


def missing_tokens(codec: TextCodec) -> str:
    """Why a model cannot infill, for the answer to the user."""
    partly = [fmt for fmt in FORMATS if any(codec.token_id(token) is not None for token in fmt.needed[:3])]
    absent = [token for fmt in partly for token in fmt.needed if codec.token_id(token) is None]
    if absent:
        return f"its vocabulary lacks {', '.join(dict.fromkeys(absent))}"
    return "its vocabulary holds no fill-in-the-middle tokens of any known family"


def _bos(codec: TextCodec) -> int | None:
    """Begin-of-text id if the tokenizer puts one in front of a prompt."""
    bos = codec.tokenizer.bos_token_id
    return bos if bos is not None and codec.encode_prompt("a")[:1] == [bos] else None
