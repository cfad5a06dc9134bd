"""A model that calls tools."""

from typing import Any

CALL = "{'name': call.function.name, 'arguments': call.function.arguments} | tojson"
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls %}"
    "<tool_call>\n{{ " + CALL + " }}\n</tool_call>{% endfor %}{% endfor %}"
)
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
TEXT = (
    'I call.\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
)
