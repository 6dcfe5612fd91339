"""Chat templates of a few lines, each with the calls of one family of models."""

import json

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

QWEN25 = r"""{%- if tools %}{{- "<|im_start|>system\n" }}
{%- if messages[0].role == "system" %}{{- messages[0].content }}{%- else %}{{- "You are helpful." }}{%- endif %}
{{- "\n\n# Tools\n\n<tools>" }}{%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
{{- "\n</tools>\n\nCalls stand within <tool_call></tool_call>.<|im_end|>\n" }}
{%- else %}{%- if messages[0].role == "system" %}{{- "<|im_start|>system\n" + messages[0].content + "<|im_end|>\n" }}
{%- else %}{{- "<|im_start|>system\nYou are helpful.<|im_end|>\n" }}{%- endif %}{%- endif %}
{%- for message in messages %}
{%- if message.role == "user" or (message.role == "system" and not loop.first)
    or (message.role == "assistant" and not message.tool_calls) %}
{{- "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" }}
{%- elif message.role == "assistant" %}{{- "<|im_start|>assistant" }}
{%- if message.content %}{{- "\n" + message.content }}{%- endif %}
{%- for tool_call in message.tool_calls %}
{{- "\n<tool_call>\n{\"name\": \"" + tool_call.function.name + "\", \"arguments\": " }}
{{- tool_call.function.arguments | tojson }}{{- "}\n</tool_call>" }}{%- endfor %}{{- "<|im_end|>\n" }}
{%- elif message.role == "tool" %}
{{- "<|im_start|>user\n<tool_response>\n" + message.content + "\n</tool_response><|im_end|>\n" }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\n" }}{%- endif %}"""
"""A developer's message vanishes."""

QWEN3 = QWEN25.replace(
    '{%- if message.content %}{{- "\\n" + message.content }}{%- endif %}',
    """{%- if message.reasoning_content %}
{{- "\\n<think>\\n" + message.reasoning_content + "\\n</think>\\n" }}{%- endif %}
{%- if message.content %}{{- "\\n" + message.content }}{%- endif %}""",
).replace(
    '{{- "<|im_start|>assistant\\n" }}',
    """{{- "<|im_start|>assistant\\n" }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- "<think>\\n\\n</think>\\n\\n" }}{%- endif %}""",
)
"""The model opens its thoughts itself."""

QWEN35 = (
    QWEN3.replace("{%- if tools %}", """{%- for message in messages %}
{%- if message.role == "system" and not loop.first %}
{{- raise_exception("System message must be at the beginning.") }}{%- endif %}{%- endfor %}{%- if tools %}""", 1)
    .replace('</think>\\n\\n" }}{%- endif %}', '</think>\\n\\n" }}{%- else %}{{- "<think>\\n" }}{%- endif %}')
)  # fmt: skip
"""The template opens the thoughts; a system message may only come first."""

LLAMA3 = r"""{%- for message in messages %}
{%- if message.role == "tool" %}{{- "<|start_header_id|>ipython<|end_header_id|>\n\n" + (message.content | tojson) }}
{{- "<|eot_id|>" }}
{%- elif message.tool_calls %}{%- if message.tool_calls | length != 1 %}
{{- raise_exception("This model only supports single tool-calls at once!") }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
{%- else %}
{{- "<|start_header_id|>" + message.role + "<|end_header_id|>\n\n" + (message.content | trim) + "<|eot_id|>" }}
{%- endif %}
{%- if loop.first and tools %}{{- 'Respond with JSON: {"name": …, "parameters": …}.\n' }}
{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start_header_id|>assistant<|end_header_id|>\n\n" }}{%- endif %}"""
"""One call at a time; any role is written as it comes."""

MISTRAL = r"""{%- if messages[0].role == "system" %}
{%- set system = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in rest %}{%- if not (message.role == "tool" or message.tool_calls is defined) %}
{%- if (message.role == "user") != (ns.index % 2 == 0) %}
{{- raise_exception("After the optional system message, conversation roles must alternate user/assistant/…") }}
{%- endif %}{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}
{%- for message in rest %}
{%- if message.role == "user" %}
{%- if tools and loop.last %}{{- "[AVAILABLE_TOOLS] " + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}{%- endif %}
{%- if system is defined and loop.last %}{{- "[INST] " + system + "\n\n" + message.content + "[/INST]" }}
{%- else %}{{- "[INST] " + message.content + "[/INST]" }}{%- endif %}
{%- elif message.tool_calls is defined %}{{- "[TOOL_CALLS] [" }}
{%- for call in message.tool_calls %}{%- if call.id is not defined or call.id | length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{%- endif %}
{{- call.function | tojson }}{{- ", \"id\": \"" + call.id + "\"" }}{%- endfor %}{{- "]</s>" }}
{%- elif message.role == "assistant" %}{{- " " + message.content + "</s>" }}
{%- elif message.role == "tool" %}{%- if message.tool_call_id | length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{%- endif %}
{{- "[TOOL_RESULTS] {\"content\": " + (message.content | string) + ", \"call_id\": \"" + message.tool_call_id }}
{{- "\"}[/TOOL_RESULTS]" }}
{%- else %}{{- raise_exception("Only user and assistant roles are supported") }}{%- endif %}{%- endfor %}"""
"""User and assistant must alternate; ids have nine characters; instructions stand in the last turn."""

GEMMA = r"""{%- if messages[0].role == "system" %}{{- raise_exception("System role not supported") }}{%- endif %}
{%- for message in messages %}
{%- if (message.role == "user") != (loop.index0 % 2 == 0) %}
{{- raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}{%- endif %}
{{- "<start_of_turn>" + ("model" if message.role == "assistant" else message.role) + "\n" }}
{{- (message.content | trim) + "<end_of_turn>\n" }}{%- endfor %}
{%- if add_generation_prompt %}{{- "<start_of_turn>model\n" }}{%- endif %}"""
"""No system, no tools."""

GPT_OSS = r"""{%- if tools %}{{- "<|start|>system<|message|>namespace functions: " + (tools | tojson) }}
{{- "<|end|>" }}{%- endif %}{%- for message in messages %}
{%- if message.role == "assistant" and message.tool_calls %}
{%- if message.thinking %}{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
{%- endif %}{%- for call in message.tool_calls %}
{{- "<|start|>assistant to=functions." + call.function.name + "<|channel|>commentary json<|message|>" }}
{{- call.function.arguments | tojson }}{{- "<|call|>" }}{%- endfor %}
{%- elif message.role == "assistant" %}{%- if "<|channel|>" in message.content %}
{{- raise_exception("You have passed a message containing <|channel|> tags in the content field.") }}{%- endif %}
{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
{%- elif message.role == "tool" %}
{{- "<|start|>functions to=assistant<|channel|>commentary<|message|>" + message.content + "<|end|>" }}
{%- else %}{{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{%- endif %}"""
"""Everything stands in a channel; thoughts are in a field of another name."""

MINISTRAL = r"""{%- if tools %}{{- "[AVAILABLE_TOOLS]" + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}{%- endif %}
{%- for message in messages %}
{%- if message.role == "user" %}{{- "[INST]" + message.content + "[/INST]" }}
{%- elif message.role == "assistant" %}
{%- if message.content is string %}{{- message.content }}
{%- else %}{%- for block in message.content %}
{%- if block.type == "text" %}{{- block.text }}
{%- elif block.type == "thinking" %}{{- "[THINK]" + block.thinking + "[/THINK]" }}{%- endif %}{%- endfor %}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- "[TOOL_CALLS]" + call.function.name + "[ARGS]" + (call.function.arguments | tojson) }}{%- endfor %}{{- "</s>" }}
{%- elif message.role == "tool" %}{{- "[TOOL_RESULTS]" + message.content + "[/TOOL_RESULTS]" }}
{%- else %}{{- "[SYSTEM_PROMPT]" + message.content + "[/SYSTEM_PROMPT]" }}{%- endif %}{%- endfor %}"""
"""Thoughts are parts of the content."""

FAMILIES = {
    "qwen2.5": QWEN25, "qwen3": QWEN3, "qwen3.5": QWEN35, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA,
    "chatml": CHATML, "none": None,
}  # fmt: skip
"""Templates in the style of those of families of models."""


def called(family, name, arguments):
    """A call as models of a family write it."""
    call = {"name": name, "arguments": arguments}
    if family == "llama3":
        return json.dumps({"name": name, "parameters": arguments})
    return (
        f"[TOOL_CALLS] [{json.dumps(call)}]"
        if family == "mistral"
        else f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    )


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
