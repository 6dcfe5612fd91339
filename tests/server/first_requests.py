# ruff: noqa: RUF012
"""First requests as agents send them, and how each sends what came of a call: written anew, in their shapes."""

import json

ASKED = "List the files here, then say how many there are."
RULES = "You are a coding agent. Keep going until the task is done."
SCHEMA = {
    "type": "object",
    "properties": {"cmd": {"type": "string", "description": "What to run."}, "timeout": {"type": "number"}},
    "required": ["cmd"],
    "additionalProperties": False,
}
CAME = "a.py\nb.py\n"


def function(name, description="Runs it.", schema=SCHEMA):
    return {"type": "function", "name": name, "description": description, "strict": False, "parameters": schema}


def chat_function(name):
    return {"type": "function", "function": {"name": name, "description": "Runs it.", "parameters": SCHEMA}}


def text(role, *said):
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": one} for one in said]}


class Codex:
    path = "/v1/responses"
    tools = [
        function("exec"),
        function("write_stdin"),
        {"type": "namespace", "name": "agents_v1", "description": "Others.", "tools": [function("close_agent")]},
        {
            "type": "custom",
            "name": "apply_patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "s: x"},
        },
        {"type": "web_search", "external_web_access": True},
    ]
    body = {
        "model": "local", "instructions": RULES, "store": False, "tool_choice": "auto", "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"}, "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "1", "client_metadata": {"a": "b"}, "text": {"verbosity": "medium"}, "tools": tools,
        "input": [
            text("developer", "The sandbox is read-only. ", "Approvals: never."),
            text("developer", "Skills: none."),
            text("user", "<environment>here</environment>"),
            text("user", ASKED),
        ],
    }  # fmt: skip
    left_out = ["tools.3 (custom)", "tools.4 (web_search)"]

    def after(self, body, answer):
        outputs = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": CAME}
            for item in answer["output"]
            if item["type"] == "function_call"
        ]
        return {**body, "input": [*body["input"], *answer["output"], *outputs]}

    def calls(self, answer):
        made = [item for item in answer["output"] if item["type"] == "function_call"]
        return [(item["name"], json.loads(item["arguments"])) for item in made]


class LateTools(Codex):
    """Later versions send their tools as an item of the input."""

    body = {
        **Codex.body, "tools": [],
        "input": [{"type": "additional_tools", "tools": Codex.tools}, *Codex.body["input"]],
    }  # fmt: skip
    left_out = ["input.tools.3 (custom)", "input.tools.4 (web_search)"]


class OpenCode:
    path = "/v1/chat/completions"
    body = {
        "model": "local", "max_tokens": 400, "tools": [chat_function("bash"), chat_function("exec")],
        "messages": [{"role": "system", "content": RULES}, {"role": "user", "content": ASKED}],
        "tool_choice": "auto", "stream_options": {"include_usage": True},
    }  # fmt: skip
    left_out = []

    def after(self, body, answer):
        message = {key: value for key, value in answer["choices"][0]["message"].items() if key != "refusal"}
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": CAME} for call in message.get("tool_calls", ())
        ]
        return {**body, "messages": [*body["messages"], message, *results]}

    def calls(self, answer):
        made = answer["choices"][0]["message"].get("tool_calls", ())
        return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in made]


class QwenCode(OpenCode):
    """Sends parts, cache marks, and fields of its own."""

    body = {
        **OpenCode.body, "temperature": 0, "top_p": 1, "metadata": {"sessionId": "1"},
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": RULES, "cache_control": {"type": "ephemeral"}}]},
            {"role": "user", "content": [{"type": "text", "text": "This is the context."}]},
            {"role": "user", "content": [{"type": "text", "text": ASKED}]},
        ],
    }  # fmt: skip


class Aider(OpenCode):
    """No tools: examples and reminders as turns, the system's among the last ones."""

    body = {
        "model": "local", "temperature": 0,
        "messages": [
            {"role": "system", "content": RULES},
            {"role": "user", "content": "I switched to a new code base."},
            {"role": "assistant", "content": "Ok."},
            {"role": "user", "content": ASKED},
            {"role": "system", "content": "Only answer with blocks."},
        ],
    }  # fmt: skip


class ClaudeCode:
    path = "/v1/messages"
    body = {
        "model": "local", "max_tokens": 400, "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "u"},
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=00000;"},
            {"type": "text", "text": RULES, "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "<reminder>be brief</reminder>"}, {"type": "text", "text": ASKED}],
            }
        ],
        "tools": [
            {"name": "exec", "description": "Runs it.", "input_schema": SCHEMA},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
    }  # fmt: skip
    left_out = ["context_management", "tools.1 (web_search_20250305)", "messages.0 (x-anthropic-billing-header)"]

    def after(self, body, answer):
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": CAME}]}
            for block in answer["content"]
            if block["type"] == "tool_use"
        ]
        results.append({"type": "text", "text": "<reminder>go on</reminder>"})
        said = [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}]
        return {**body, "messages": [*body["messages"], *said]}

    def calls(self, answer):
        return [(block["name"], block["input"]) for block in answer["content"] if block["type"] == "tool_use"]


class LaterClaudeCode(ClaudeCode):
    """Later versions say who else can be asked in a system message behind the user's."""

    body = {
        **ClaudeCode.body, "tools": ClaudeCode.body["tools"][:1],
        "messages": [*ClaudeCode.body["messages"], {"role": "system", "content": "Other agents: none."}],
    }  # fmt: skip
    left_out = ["context_management", "messages.0 (x-anthropic-billing-header)"]


class AnthropicTools(ClaudeCode):
    """The loop of Anthropic's packages asks for a thread; if none is kept, it sends all messages, as for a new one."""

    body = {
        "model": "local", "max_tokens": 400, "thread": {"type": "create"}, "system": RULES,
        "messages": [{"role": "user", "content": ASKED}], "tools": ClaudeCode.body["tools"][:1],
    }  # fmt: skip
    left_out = ["thread"]


class OpenAIAgents(Codex):
    """What came has a state, as every item has that came from a server."""

    body = {
        "model": "local", "instructions": RULES, "include": [], "tools": [{**function("exec"), "strict": True}],
        "input": [{"role": "user", "content": ASKED}],
    }  # fmt: skip
    left_out = []


class AISDK(Codex):
    """Instructions are the first item."""

    body = {
        "model": "local", "tool_choice": "auto", "tools": [function("exec")],
        "input": [
            {"role": "system", "content": RULES}, {"role": "user", "content": [{"type": "input_text", "text": ASKED}]},
        ],
    }  # fmt: skip
    left_out = []


class Ollama(OpenCode):
    """Ollama's packages: calls have no ids, and results the name of what was called."""

    path = "/api/chat"
    body = {
        "model": "local", "think": False, "options": {"num_ctx": 4096, "temperature": 0.1}, "keep_alive": "5m",
        "messages": [{"role": "system", "content": RULES}, {"role": "user", "content": ASKED}],
        "tools": [chat_function("exec")], "stream": False,
    }  # fmt: skip

    def after(self, body, answer):
        results = [
            {"role": "tool", "tool_name": call["function"]["name"], "content": CAME}
            for call in answer["message"].get("tool_calls", ())
        ]
        return {**body, "messages": [*body["messages"], answer["message"], *results]}

    def calls(self, answer):
        made = answer["message"].get("tool_calls", ())
        return [(call["function"]["name"], call["function"]["arguments"]) for call in made]


class Smolagents(OpenCode):
    """Writes calls and results into texts of its own."""

    body = {
        "model": "local", "stop": ["Observation:", "Calling tools:"], "tools": [chat_function("exec")],
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": RULES}]},
            {"role": "user", "content": [{"type": "text", "text": f"New task:\n{ASKED}"}]},
        ],
    }  # fmt: skip

    def after(self, body, answer):
        told = (("assistant", f"Calling tools:\n{self.calls(answer)}"), ("user", f"Observation:\n{CAME}"))
        said = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in told]
        return {**body, "messages": [*body["messages"], *said]}


CLIENTS = [
    Codex(), LateTools(), OpenCode(), QwenCode(), Aider(), ClaudeCode(), LaterClaudeCode(), AnthropicTools(),
    OpenAIAgents(), AISDK(), Ollama(), Smolagents(),
]  # fmt: skip
