"""Configuration: every default of the library in one place, checked when a config is made."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import stat
import tempfile
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from retrieve_spec.errors import ConfigError, nearest, require

logger = logging.getLogger(__name__)
AUTO: Literal["auto"] = "auto"
OFF: Literal["off"] = "off"
MAX_NODES = 1024
"""Hard limit of draft nodes per pass; a pass is never asked for more. Recorded passes take `PASS.tree_rows` rows."""
CACHE_VARIABLE = "RETRIEVE_SPEC_CACHE"
FEW_ROOTS = 16
"""Tokens of a prompt that are read in one pass with the first draft after them."""


def dial(nodes: int | str) -> int | None:
    """Nodes per pass that are asked for, None where measured cost decides.

    Raises
    ------
    ConfigError
        Something else is asked for.
    """
    if nodes == AUTO:
        return None
    right = isinstance(nodes, int) and 0 <= nodes <= MAX_NODES
    require(right, f"nodes to be 'auto' or 0 … {MAX_NODES}", nodes, "Leave it at 'auto'.")
    return int(nodes)


def cache_dir() -> Path:
    """Folder for what can be made again (unpacked models, workspaces' stores); not created here.

    `RETRIEVE_SPEC_CACHE` names it; otherwise it follows the XDG rule: `$XDG_CACHE_HOME/retrieve-spec`, by default
    `~/.cache/retrieve-spec`. A user without a home that can be written, as containers have them, gets a folder among
    temporary files.
    """
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser()
    with contextlib.suppress(RuntimeError):  # no home
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "retrieve-spec"
        if folder.exists() or can_be_written(folder):
            return folder
    return temporary_dir("What can be made again", CACHE_VARIABLE)


def can_be_written(folder: Path) -> bool:
    """Whether a folder can be written, or made where it is missing."""
    nearest_there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    return os.access(nearest_there, os.W_OK)


@functools.cache
def temporary_dir(what: str, variable: str) -> Path:
    """The user's folder among temporary files; a warning says what is kept there, and which variable names another."""
    folder = Path(tempfile.gettempdir()) / f"retrieve-spec-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:  # another user's
        folder = Path(tempfile.mkdtemp(prefix="retrieve-spec-"))
    logger.warning("%s is kept in %s: set %s to a folder that can be written and stays", what, folder, variable)
    return folder


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How a model drafts.

    Attributes
    ----------
    draft
        `"auto"`, `"off"` or the name of a preset (`retrieve_spec.drafting.presets`).
    nodes
        The one dial: draft nodes per pass, 0 … 1024, or `"auto"` (sized by measured cost).
    max_depth
        Longest drafted path.
    min_path_probability
        A node whose estimated path probability is lower is not drafted.
    prompt_logits
        How many positions at the end of the prompt teach the recycling source (0: none); the rows of a call share them.
    prefill_chunk
        Prompt tokens read per pass, so that a stream can be closed in between (0: the whole prompt at once).
    session
        Keep the text of earlier generations of this model object and draft from it; with a path, also keep it in that
        file, for later processes.
    session_tokens
        Bound of the session's memory, in tokens; each scope has one.
    provenance
        Record where every accepted drafted run stands in the stores.
    dense
        Whether `auto` drafts from the dense indexes of its stores: `"auto"` (those built with this model; a store built
        with another one is an error) or `"off"` (only what the stores hold besides).
    phrases
        Whether `auto` drafts from what follows one or two tokens in the answers of several requests: `"auto"` (kept
        beside the calibration) or `"off"` (neither drafted from nor learned).
    rollouts
        A `RolloutMemory`: answers of earlier calls that samples of the same prompt draft from.
    exact
        Give every token the same logits bit for bit with drafts and without: greedy and sampled text is then that of
        `draft="off"`. For dense models in 16 bits or with packed weights, on a GPU with Triton; others are decoded
        without drafts.
    recorded_pass
        Record the model's forward once and verify with the recording and a preallocated cache, where that agrees with
        the model: `"auto"` (models of a million parameters and more), `"always"` or `"off"`.
    """

    draft: str = AUTO
    nodes: int | Literal["auto"] = AUTO
    max_depth: int = 256
    min_path_probability: float = 0.0005
    prompt_logits: int = 8
    prefill_chunk: int = 0
    session: bool | str | os.PathLike[str] = False
    session_tokens: int = 1_000_000
    provenance: bool = False
    dense: Literal["auto", "off"] = AUTO
    phrases: Literal["auto", "off"] = AUTO
    rollouts: Any = None
    exact: bool = False
    recorded_pass: Literal["auto", "always", "off"] = AUTO

    def __post_init__(self) -> None:
        dial(self.nodes)
        least, session = self.min_path_probability, self.session
        require(0.0 <= least < 1.0, "min_path_probability in [0, 1)", least, "Leave it at its default.")
        for name in ("max_depth", "session_tokens"):
            require(getattr(self, name) >= 1, f"{name} of at least 1", getattr(self, name), "Give a positive number.")
        kinds = (AUTO, "always", "off")
        require(self.recorded_pass in kinds, f"recorded_pass among {kinds}", self.recorded_pass, "Leave it at 'auto'.")
        is_place = isinstance(session, bool | str | os.PathLike)
        require(is_place, "session True, False or a path", session, "Name a file, or leave it out.")
        for name in ("dense", "phrases"):
            value = getattr(self, name)
            require(value in (AUTO, "off"), f"{name} 'auto' or 'off'", value, "Leave it at 'auto'.")
        rows = self.prompt_logits
        require(rows >= 0, "prompt_logits of at least 0", rows, "Give 0 to switch it off.")

    def with_options(self, **options: Any) -> SpeculationConfig:
        """Copy with some options replaced; an unknown name is an error that names the closest valid one."""
        known = [field.name for field in fields(self)]
        for name in options:
            if name not in known:
                hint = nearest(name, known) or f"Use one of {', '.join(known)}."
                raise ConfigError("a known option", repr(name), hint)
        return replace(self, **options)


@dataclass(frozen=True, slots=True)
class PassConfig:
    """How the recorded pass uses memory.

    Attributes
    ----------
    cache_block
        Rows by which a key-value cache grows at least.
    mask_bytes
        Largest mask buffer; beyond it the prefix is attended to without a mask and merged.
    max_rows
        Tokens of one recorded pass at most.
    tree_rows
        Root tokens and draft nodes of one recorded pass at most.
    score_bytes
        Attention scores that exist at a time where the prefix is attended to in blocks.
    batch_rows
        Sequences that one pass serves at most, and that one call has under way at most; the others wait.
    batch_bytes
        Memory that keys and values of the sequences of one call may take before further ones wait.
    prompt_piece
        Prompt tokens that are read between two passes of other sequences.
    graph_bytes
        GPU memory that captured graphs may hold.
    graph_logits
        Rows of a widest graph that logits are computed for where it reads prompts.
    cuda_graphs
        Replay passes on a GPU as captured graphs, one per number of rows in `graph_rows`.
    fused_rows
        Run normalisation, rotary embeddings and gates in one call each.
    graph_rows
        Rows of a pass (roots, pieces of prompts and drafted nodes of all texts) are padded to the next of these.
    min_parameters
        Smallest model whose pass is recorded unasked; recording takes a second or more.
    """

    cache_block: int = 256
    mask_bytes: int = 64 << 20
    max_rows: int = 512
    tree_rows: int = 257
    score_bytes: int = 8 << 20
    batch_rows: int = 64
    batch_bytes: int = 4 << 30
    prompt_piece: int = 512
    graph_bytes: int = 2 << 30
    graph_logits: int = 64
    cuda_graphs: bool = True
    fused_rows: bool = True
    graph_rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 257, 512)
    min_parameters: int = 1_000_000


PASS = PassConfig()
"""The defaults of the recorded pass."""


EDITORS = ("vscode", "vim", "neovim", "minuet", "zed", "continue")
"""Whose settings `retrieve-spec editor` knows."""
TOOL_FORMATS = (
    "hermes", "kimi", "deepseek-v3", "deepseek-v3.1", "deepseek-v4", "deepseek-v3.2", "gpt-oss", "gemma4",
    "functiongemma", "minimax", "mistral-args", "mistral", "seed-oss", "qwen-coder", "glm", "functionary",
    "phi", "granite", "cohere", "nemotron", "tool-calls", "lfm2", "pythonic", "llama",
)  # fmt: skip
"""Ways in which models write calls of tools."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is loaded.

    Attributes
    ----------
    dtype
        Number format of the weights; `"auto"` takes them as stored.
    quantize
        `"int8"`, `"int4"` or, on a GPU, `"fp8"` or `"nf4"` packs the weights; None leaves them as they are.
    device
        `"auto"`, or a device by torch's name.
    """

    dtype: str = "auto"
    quantize: str | None = None
    device: str = "auto"


@dataclass(frozen=True, slots=True)
class DraftSources:
    """What a server drafts from besides the prompt.

    Attributes
    ----------
    workspaces
        Folders, kept current while they change.
    stores
        Datastores.
    session
        File in which the model's answers are kept, each for whoever asked; None keeps none.
    """

    workspaces: tuple[Path, ...] = ()
    stores: tuple[Path | str, ...] = ()
    session: Path | None = None


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """How the IDE backend serves.

    Attributes
    ----------
    host, port
        Where to listen. A host that is not this machine's own needs an API key.
    ctx_size
        Tokens of a prompt and its completion at most; 0 for as many as the model has positions.
    fim_window
        Tokens of prefix and suffix together in a fill-in-the-middle prompt; 0 for as many as keep the first token of a
        keystroke below 150 ms on this machine, and 2,048 at least where the model has room for them.
    prefix_share
        Share of the prefix in that.
    cache_bytes
        Bytes of key-value caches that are kept for reuse; no single prompt may need more.
    slots
        Key-value caches kept for reuse; each document that is typed in needs one.
    chats
        Answers that are decoded at the same time, after completions at a cursor, of which many are.
    max_queue
        Requests that may wait for the model.
    tool_format
        How the model writes calls of tools, one of `TOOL_FORMATS`; None is told from its chat template.
    prefill_chunk
        Prompt tokens read between two passes, so that reading can be cancelled and holds nobody up.
    max_body_bytes
        Largest request accepted of who may call; what a conversation may have is for the model's positions to say.
    bodies_bytes
        Bytes of large requests that may be held while they are being read, over all connections.
    body_s
        Seconds a request's body may take.
    stale_s
        A keystroke that waited longer is answered as superseded.
    deadline_s
        Seconds of work after which an answer ends whose request says nothing of it; 0 for no end.
    infill_deadline_s
        The same for `/infill` and language servers, where `deadline_s` is 0.
    sse_ping_s
        Seconds without a word after which a stream has a comment, so that clients do not give up; 0 for none.
    workspace_bytes
        Bytes of each of a workspace's folders that are drafted from at most, those that changed last.
    workspace_licences
        SPDX identifiers of the licences under which a workspace's files are drafted from; any where there are none.
    origins
        Browser origins that may call; none by default.
    allowed_hosts
        Names besides this machine's own under which a server without keys may be called.
    path_prefix
        A path under which a proxy passes requests on, as `/llm`; it may be there or not.
    learn_idle
        Whether to learn the model's bigrams between requests (`engine.first_passes.learn_bigrams`).
    """

    host: str = "127.0.0.1"
    port: int = 8012
    ctx_size: int = 0
    fim_window: int = 0
    prefix_share: float = 0.75
    cache_bytes: int = 2 << 30
    slots: int = 32
    chats: int = 4
    max_queue: int = 32
    tool_format: str | None = None
    prefill_chunk: int = 256
    max_body_bytes: int = 64 << 20
    bodies_bytes: int = 256 << 20
    body_s: float = 30.0
    stale_s: float = 3.0
    deadline_s: float = 0.0
    infill_deadline_s: float = 10.0
    sse_ping_s: float = 30.0
    workspace_bytes: int = 16_000_000
    workspace_licences: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    path_prefix: str = ""
    learn_idle: bool = False


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """What the dense indexes of a datastore hold: hidden states of a model as keys of positions.

    Attributes
    ----------
    model
        Folder of the model, hub id or `"reference"`.
    layer
        `"last"` (after the final norm) or N ≥ 1, what the N-th block hands on.
    dims
        Numbers of a key, after PCA.
    max_vectors
        Keys of one build at most, 0 for all positions; random windows of the text are left out.
    window, overlap
        Tokens the model reads at once, and how many of them the window before had: context that a position has at
        least, where its document has it.
    sample
        Positions that mean, scale and principal components are fitted to.
    """

    model: str
    layer: int | str = "last"
    dims: int = 64
    max_vectors: int = 0
    window: int = 1024
    overlap: int = 256
    sample: int = 1 << 15

    def __post_init__(self) -> None:
        layer, most = self.layer, self.max_vectors
        a_number = isinstance(layer, int) and layer >= 1
        require(layer == "last" or a_number, "layer 'last' or a number from 1", layer, "Leave it at 'last'.")
        require(1 <= self.dims <= 1024, "dims in 1 … 1024", self.dims, "Leave it at 64.")
        require(most >= 0, "max_vectors of at least 0", most, "Give 0 to keep all positions.")
        shorter = 0 <= self.overlap < self.window
        require(shorter, "an overlap shorter than the window", self.overlap, "Leave both at their defaults.")


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """How a datastore is built.

    Attributes
    ----------
    index
        What is kept: `"both"`, only the `"exact"` index (tokens and suffix array) or only `"ngram"` tables.
    segment_tokens
        Tokens of one segment at most; a document that is longer is one by itself. A process that indexes one takes
        about 25 bytes of memory per token.
    ngram_orders
        Longest context of an n-gram table, 1 … 5.
    ngram_successors
        Continuations kept per context.
    ngram_share
        Size of an n-gram table at most, as a share of the segment's tokens and suffix array …
    ngram_floor
        … or this many bytes, where that is more (pruning a small table costs drafts and saves nothing).
    document_bytes
        Longer documents are skipped as huge.
    dense
        Dense indexes to build, or None.
    """

    index: Literal["both", "exact", "ngram"] = "both"
    segment_tokens: int = 1 << 26
    ngram_orders: int = 5
    ngram_successors: int = 12
    ngram_share: float = 0.25
    ngram_floor: int = 32 << 20
    document_bytes: int = 64 << 20
    dense: DenseConfig | None = None

    def __post_init__(self) -> None:
        if isinstance(self.dense, dict):  # read back from a manifest
            known = {each.name for each in fields(DenseConfig)}  # earlier versions had others, too
            object.__setattr__(self, "dense", DenseConfig(**{k: v for k, v in self.dense.items() if k in known}))
        kinds, size, orders = ("both", "exact", "ngram"), self.segment_tokens, self.ngram_orders
        keeps_text = self.dense is None or self.index != "ngram"
        require(keeps_text, "an index that keeps the text, for dense keys", self.index, "Leave index at 'both'.")
        require(self.index in kinds, f"index to be one of {kinds}", self.index, "Leave it at 'both'.")
        require(1 <= size <= 1 << 30, "segment_tokens in 1 … 2^30", size, "Leave it at its default.")
        require(1 <= orders <= 5, "ngram_orders in 1 … 5", orders, "Leave it at its default.")
        successors, longest = self.ngram_successors, self.document_bytes
        require(successors >= 1, "ngram_successors of at least 1", successors, "Give a positive number.")
        require(1 <= longest <= 1 << 30, "document_bytes in 1 … 2^30", longest, "Divide longer texts into files.")
