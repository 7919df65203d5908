"""How a chat template describes tools, and how its model writes calls.

A template without tools gets the same information in plain messages, in the format of Hermes: the functions
in the system message, calls and results between tags. See `Hermes-Function-Calling` by Nous Research.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

_INSTRUCTIONS = """You may call one or more functions to help with the request. The functions are within \
<tools></tools> tags:
<tools>
{functions}
</tools>
For each call, write a JSON object with the name of the function and its arguments within \
<tool_call></tool_call> tags:
<tool_call>
{{"name": "<name of the function>", "arguments": {{<its arguments>}}}}
</tool_call>"""


def tool_format_of(template: str) -> str:
    """The format of calls: `mistral`, `llama3`, or `hermes`, which is also that of `with_plain_tools`."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" not in template and ("<|python_tag|>" in template or '"parameters": dict' in template):
        return "llama3"
    return "hermes"


def with_plain_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The same chat in system, user and assistant messages."""
    chat = [_plain(message) for message in messages]
    if not tools:
        return chat
    functions = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(functions=functions)
    if chat and chat[0].get("role") == "system":
        first = {**chat[0], "content": f"{chat[0]['content']}\n\n{instructions}"}
        return [first, *chat[1:]]
    return [{"role": "system", "content": instructions}, *chat]


def has_tool_turns(messages: Sequence[Message]) -> bool:
    """Whether the chat contains calls or results."""
    return any(message.get("role") == "tool" or message.get("tool_calls") for message in messages)


def _plain(message: Message) -> Message:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    if not calls:
        return message
    texts = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
    return {"role": message["role"], "content": "\n".join(filter(None, [message["content"], *texts]))}
