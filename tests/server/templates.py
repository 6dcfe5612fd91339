"""Chat templates of a few lines, each with the calls of one family of models."""

CHATML = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Knows no tools."""

HERMES = """{% if tools %}<|im_start|>system
Call a function with {"name": …, "arguments": …} within <tool_call></tool_call>. There are:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "The text of a file.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"enum": ["a.py", "b.py"]}, "line": {"$ref": "#/$defs/line"}},
                "required": ["path", "line"],
                "$defs": {"line": {"enum": [1, 2, 3]}},
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"enum": [1, 20]}, "b": {"type": "boolean"}},
                "required": ["a", "b"],
            },
        },
    },
]


def is_right(name, arguments):
    """Whether a call of one of the tools has arguments under its schema."""
    if name == "add":
        return set(arguments) == {"a", "b"} and arguments["a"] in (1, 20) and isinstance(arguments["b"], bool)
    return name == "read_file" and arguments["path"] in ("a.py", "b.py") and arguments["line"] in (1, 2, 3)
