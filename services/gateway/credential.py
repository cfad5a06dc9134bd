"""The key that a client sends: OpenAI's clients and Anthropic's have different headers for it."""

from collections.abc import Mapping


def credential(headers: Mapping[str, str]) -> str:
    """In the form of `Authorization`; empty if there is none."""
    key = headers.get("x-api-key")
    return headers.get("Authorization", "") or ("" if key is None else f"Bearer {key}")
