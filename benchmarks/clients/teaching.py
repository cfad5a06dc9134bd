"""Teaches a small model a few answers by heart, for suites that need a model which calls a tool
when it is asked to."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from services.gateway.asked import chat
from services.gateway.history import Dialogue
from services.local.demo_tokenizer import BOS, CHAT_TEMPLATE, EOS
from shared.chat_template import ChatTemplate

RATE = 2e-3
MOST_STEPS = 600
AT_ONCE = 8
_IGNORED = -100
"""The label of a token that need not be learned."""


class Call(msgspec.Struct):
    name: str
    arguments: dict[str, Any]


class Lesson(msgspec.Struct, kw_only=True):
    """A chat, and what comes next in it: a text, or a call."""

    messages: list[Any]
    tools: list[Any] = []
    reply: str = ""
    call: Call | None = None

    def texts(self) -> tuple[str, str]:
        """The prompt as the gateway makes it, and the reply."""
        body = {"model": "any", "messages": self.messages, "tools": self.tools}
        (dialogue,) = chat(msgspec.json.encode(body)).prompts
        assert isinstance(dialogue, Dialogue)
        template = ChatTemplate(CHAT_TEMPLATE, {"bos_token": BOS, "eos_token": EOS})
        prompt = template.render(
            dialogue.messages,
            add_generation_prompt=True,
            arguments={},
            tools=dialogue.tools.described() if dialogue.tools else (),
        )
        if self.call is None:
            return prompt, self.reply + EOS
        function = {"name": self.call.name, "arguments": self.call.arguments}
        called = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
        said = template.render([called], add_generation_prompt=False, arguments={})
        return prompt, said.removeprefix(f"{BOS}<|assistant|>")


def teach(checkpoint: Path, lessons: Path) -> None:
    """Trains the checkpoint's model until it says every reply of the lessons (JSON)."""
    known = msgspec.json.decode(lessons.read_bytes(), type=list[Lesson])
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    batches = list(_batches(tokenizer, known))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    torch.manual_seed(0)
    for step in range(MOST_STEPS):
        wrong = 0
        for tokens, labels in batches:
            found = model(tokens, labels=labels)
            found.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            best = found.logits[:, :-1].argmax(-1)
            due = labels[:, 1:]
            wrong += int(((best != due) & (due != _IGNORED)).sum())
        if step % 20 == 0 or not wrong:
            print(f"taught {step} times: {wrong} tokens wrong", file=sys.stderr, flush=True)
        if not wrong:
            break
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})


def _batches(
    tokenizer: Tokenizer, lessons: list[Lesson]
) -> "list[tuple[torch.Tensor, torch.Tensor]]":
    """Tokens and labels, [lessons, positions], with lessons of about the same length together."""
    rows = []
    for lesson in lessons:
        prompt, reply = (
            tokenizer.encode(text, add_special_tokens=False).ids for text in lesson.texts()
        )
        rows.append((prompt + reply, [_IGNORED] * len(prompt) + reply))
    rows.sort(key=lambda row: len(row[0]))
    batches = []
    for start in range(0, len(rows), AT_ONCE):
        part = rows[start : start + AT_ONCE]
        width = max(len(tokens) for tokens, _ in part)
        tokens = [row + [0] * (width - len(row)) for row, _ in part]
        labels = [row + [_IGNORED] * (width - len(row)) for _, row in part]
        batches.append((torch.tensor(tokens), torch.tensor(labels)))
    return batches
