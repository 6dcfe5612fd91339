"""How models write tool calls: one table of the formats of model families."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Tags:
    """Arguments that are not JSON: each is between tags, and strings are unquoted. Line ends are optional.

    Attributes
    ----------
    head, key
        Text before all arguments, and before each value; `{}` is the name of the function, or of the argument, and `*`
        whether the value is a string (`true` or `false`).
    value_close
        End of a value.
    end
        Text after all arguments.
    """

    head: str
    key: str
    value_close: str
    end: str = ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family of models writes a call.

    Attributes
    ----------
    name
        Value of `serve --tool-format`.
    tells
        Texts that chat templates of these models all contain, and templates of formats below it in `FORMATS` do not.
    opens
        Beginning of a call.
    lead
        Text between `opens` and a function's name, if the name is apart from the arguments.
    named
        Text between a function's name and its arguments; "" if one JSON object has both, or for none.
    close
        End of a call.
    arguments, function
        Keys of the arguments and of the function in that object.
    bare
        Whether the first call may begin without `opens`, and others after a semicolon.
    single
        Whether a turn ends after its call.
    listed
        Whether all calls are one JSON list.
    tags
        Form of arguments that are not JSON.
    quote
        Mark around strings in arguments that are otherwise JSON with unquoted keys.
    python
        Whether the calls are a list in Python's syntax, with arguments by name.
    section, section_end
        Text before the first call of a turn, and after the last.
    also
        Regular expression for other beginnings of a call that models write.
    between, written
        Regular expression for text that may precede `named`, and an example of it.
    """

    name: str
    tells: tuple[str, ...]
    opens: str
    lead: str = ""
    named: str = ""
    close: str = ""
    arguments: str = "arguments"
    function: str = "name"
    bare: bool = False
    single: bool = False
    listed: bool = False
    tags: Tags | None = None
    quote: str = ""
    python: bool = False
    section: str = ""
    section_end: str = ""
    also: str = ""
    between: str = ""
    written: str = ""

    @property
    def names_apart(self) -> bool:
        """Whether the function's name precedes the arguments."""
        return bool(self.lead or self.named)


_CODER = Tags("\n<function={}>\n", "<parameter={}>\n", "\n</parameter>", "</function>\n")
_PYTHON_LIST = "[func_name1(params_name1="
"""How Llama's own instructions describe calls in Python's syntax."""

HERMES = ToolFormat("hermes", ("<tool_call>",), "<tool_call>", close="</tool_call>")
"""Also used for models whose template has no tools, with the instructions of `with_tools_told`."""
FORMATS = (
    ToolFormat(
        "kimi", ("<|tool_call_argument_begin|>",), "<|tool_call_begin|>", lead="functions.", between=r":\d+",
        written=":0", named="<|tool_call_argument_begin|>", close="<|tool_call_end|>",
        section="<|tool_calls_section_begin|>", section_end="<|tool_calls_section_end|>",
    ),
    ToolFormat(
        "deepseek-v3", ("<｜tool▁sep｜>", "```json"), "<｜tool▁call▁begin｜>", lead="function<｜tool▁sep｜>",
        named="\n```json\n", close="```<｜tool▁call▁end｜>",
        section="<｜tool▁calls▁begin｜>", section_end="<｜tool▁calls▁end｜>",
    ),
    ToolFormat(
        "deepseek-v3.1", ("<｜tool▁sep｜>",), "<｜tool▁call▁begin｜>", named="<｜tool▁sep｜>",
        close="<｜tool▁call▁end｜>", section="<｜tool▁calls▁begin｜>", section_end="<｜tool▁calls▁end｜>",
    ),
    ToolFormat(
        "deepseek-v4", ("DSML｜", "tool_calls>"), '<｜DSML｜invoke name="', close="</｜DSML｜invoke>",
        tags=Tags('{}">\n', '<｜DSML｜parameter name="{}" string="*">', "</｜DSML｜parameter>"),
        section="<｜DSML｜tool_calls>", section_end="</｜DSML｜tool_calls>",
    ),
    ToolFormat(
        "deepseek-v3.2", ("DSML｜",), '<｜DSML｜invoke name="', close="</｜DSML｜invoke>",
        tags=Tags('{}">\n', '<｜DSML｜parameter name="{}" string="*">', "</｜DSML｜parameter>"),
        section="<｜DSML｜function_calls>", section_end="</｜DSML｜function_calls>",
    ),
    ToolFormat(
        "gpt-oss", ("<|channel|>", "functions."), "<|channel|>commentary to=functions.",
        also=r"(?:<\|end\|>)?(?:<\|start\|>assistant)?\s*(?:<\|channel\|>(?:commentary|analysis))?\s*to=functions\.",
        between=r"\s*(?:<\|channel\|>(?:commentary|analysis))?\s*(?:<\|constrain\|>)?(?:json)?",
        written=" <|constrain|>json", named="<|message|>", section_end="<|call|>", single=True,
    ),
    ToolFormat("gemma4", ("<|tool_call>",), "<|tool_call>", lead="call:", close="<tool_call|>", quote='<|"|>'),
    ToolFormat(
        "functiongemma", ("<start_function_call>",), "<start_function_call>", lead="call:",
        close="<end_function_call>", quote="<escape>",
    ),
    ToolFormat(
        "minimax", ("<minimax:tool_call>",), '<invoke name="', close="</invoke>",
        tags=Tags('{}">\n', '<parameter name="{}">', "</parameter>"),
        section="<minimax:tool_call>", section_end="</minimax:tool_call>",
    ),
    ToolFormat(
        "mistral-args", ("[ARGS]",), "[TOOL_CALLS]", named="[ARGS]", between=r"(?:\[CALL_ID\]\w+)?"
    ),
    ToolFormat("mistral", ("[TOOL_CALLS]",), "[TOOL_CALLS]", listed=True),
    ToolFormat("seed-oss", ("<seed:tool_call>",), "<seed:tool_call>", close="</seed:tool_call>", tags=_CODER),
    ToolFormat("qwen-coder", ("<parameter=",), "<tool_call>", close="</tool_call>", tags=_CODER),
    ToolFormat(
        "glm", ("<arg_key>",), "<tool_call>", close="</tool_call>",
        tags=Tags("{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>"),
    ),
    HERMES,
    ToolFormat("functionary", ("<function=",), "<function=", named=">", close="</function>"),
    ToolFormat("phi", ("<|tool|>",), "<|tool_call|>", also="functools", listed=True, section_end="<|/tool_call|>"),
    ToolFormat("granite", ("<|tool_call|>",), "<|tool_call|>", listed=True),
    ToolFormat(
        "cohere", ("<|START_ACTION|>",), "<|START_ACTION|>", close="<|END_ACTION|>", listed=True,
        function="tool_name", arguments="parameters",
    ),
    ToolFormat("nemotron", ("<TOOLCALL>",), "<TOOLCALL>", close="</TOOLCALL>", listed=True),
    ToolFormat("tool-calls", ("<tool_calls>",), "<tool_calls>", close="</tool_calls>", listed=True),
    ToolFormat("lfm2", ("<|tool_call_start|>",), "<|tool_call_start|>", close="<|tool_call_end|>", python=True),
    ToolFormat("lfm2", ("<|tool_list_start|>",), "<|tool_call_start|>", close="<|tool_call_end|>", python=True),
    ToolFormat(
        "pythonic", (_PYTHON_LIST,), "<|python_start|>", section_end="<|python_end|>", python=True, bare=True
    ),
    ToolFormat("llama", ("<|python_tag|>",), "<|python_tag|>", arguments="parameters", bare=True, single=True),
    ToolFormat("llama", ('"parameters": ',), "<|python_tag|>", arguments="parameters", bare=True, single=True),
)  # fmt: skip


@lru_cache(maxsize=8)  # searches thousands of characters, several times per request
def find_tool_format(template: str, name: str | None = None) -> ToolFormat | None:
    """Return the format of a name, else the one that a chat template shows, None if unknown."""
    if name:
        return next((fmt for fmt in FORMATS if fmt.name == name), None)
    return next((fmt for fmt in FORMATS if all(tell in template for tell in fmt.tells)), None)
