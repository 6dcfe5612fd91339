"""How models write calls of tools: one table of the formats of families."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Tags:
    """How arguments are written that are no JSON: each in tags, as it is where it is a string. Ends of lines may lack.

    Attributes
    ----------
    head, key
        What stands in front of all arguments, and of the value of one; `{}` is the function's name, and the argument's,
        `*` whether its value is text (`true` or `false`).
    value_close
        What a value ends with.
    end
        What stands after all arguments.
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
        What `serve --tool-format` takes.
    tells
        What stands, all of it, in the chat templates of these models, and of none of those below it in `FORMATS`.
    opens
        What a call begins with.
    lead
        What stands between that and a function's name, where the name is apart from the arguments.
    named
        What stands between a function's name and its arguments; "" where one JSON object has both, or nothing does.
    close
        What a call ends with.
    arguments, function
        What the arguments, and the function, are called in that object.
    bare
        The first call may begin without anything in front, and others after a semicolon.
    single
        A turn ends with its call.
    listed
        All calls stand in one JSON list.
    tags
        What stands between `opens` and `close` where arguments are no JSON.
    quote
        What encloses texts in arguments that are otherwise JSON without quotes around keys.
    python
        The calls are a list in Python's syntax, with arguments by name.
    section, section_end
        What stands in front of the first of several calls, and after the last.
    also
        An expression for other beginnings of a call that models write.
    between, written
        An expression for what may stand in front of `named`, and such a text.
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
        """Whether the function's name stands in front of the arguments."""
        return bool(self.lead or self.named)


_CODER = Tags("\n<function={}>\n", "<parameter={}>\n", "\n</parameter>", "</function>\n")
_PYTHON_LIST = "[func_name1(params_name1="
"""How Llama's own instructions describe calls in Python's syntax."""

HERMES = ToolFormat("hermes", ("<tool_call>",), "<tool_call>", close="</tool_call>")
"""Also that of models whose chat template knows of no tools: `with_tools_told` says how they write calls."""
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


@lru_cache(maxsize=8)  # looked for in thousands of characters, several times a request
def find_tool_format(template: str, name: str | None = None) -> ToolFormat | None:
    """The format of that name, else the one that a chat template tells of, None for one that is not known."""
    if name:
        return next((fmt for fmt in FORMATS if fmt.name == name), None)
    return next((fmt for fmt in FORMATS if all(tell in template for tell in fmt.tells)), None)
