"""A byte-level BPE tokenizer, trained here on Python's own help texts, with a chat template."""

import json
from collections.abc import Iterable
from pydoc_data.topics import topics

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

BOS, EOS = "<|begin|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
SPECIAL_TOKENS = (BOS, EOS, *ROLES)
"""The first ids, in this order."""
MIN_VOCAB = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = """{{ bos_token }}
{%- if tools %}
    {{- '<|system|>Call a function like this:\\n<tool_call>\\n' }}
    {{- '{"name": <name>, "arguments": <arguments>}\\n</tool_call>' }}
    {%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
    {{- eos_token }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'tool' %}
        {{- '<|user|><tool_response>\\n' + message['content'] + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|' + message['role'] + '|>' + message['content'] }}
    {%- endif %}
    {%- for call in message['tool_calls'] or [] %}
        {%- set called = call['function'] %}
        {{- '<tool_call>\\n{"name": ' + called['name'] | tojson }}
        {{- ', "arguments": ' + called['arguments'] | tojson + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
"""Calls of tools are written as Hermes and Qwen write them."""


def train_tokenizer(vocab_size: int, texts: Iterable[str] | None = None) -> Tokenizer:
    """A tokenizer of MIN_VOCAB to `vocab_size` tokens. Without `texts` it learns from Python's
    help, and is the same for one release of Python."""
    if texts is None:
        texts = [topics[name] for name in sorted(topics)] if vocab_size > MIN_VOCAB else []
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def tokenizer_config(context_length: int) -> str:
    """The content of tokenizer_config.json for transformers."""
    return json.dumps(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "model_max_length": context_length,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
        indent=2,
    )
