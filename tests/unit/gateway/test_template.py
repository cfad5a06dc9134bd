import json
import re
from datetime import datetime
from typing import Any

import pytest

from services.gateway.catalog import read_lingo
from shared.chat_template import ChatTemplate
from shared.errors import BadInput, ModelError
from tests.unit.gateway.support import CHAT_TEMPLATE, TOKENIZER, VOCAB, text_files

MESSAGES = [{"role": "user", "content": "a < b"}, {"role": "assistant", "content": "yes"}]
LLAMA_3 = """{{- bos_token }}
{%- set date = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{#- the system message, if there is one #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n" + system + "<|eot|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'user' or message.role == 'assistant') %}{% continue %}{% endif %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if tools is not none %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""
QWEN = """{% for message in messages %}{% if loop.first and message.role != 'system' %}
<|im_start|>system
You help.<|im_end|>
{% endif %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
{% else %}{{ {'text': message.content} | tojson }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""


def render(source: str, arguments: dict[str, Any] | None = None) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(MESSAGES, add_generation_prompt=True, arguments=arguments or {})


@pytest.mark.parametrize("source", [LLAMA_3, QWEN, CHAT_TEMPLATE])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_as_transformers_does(source: str, add_generation_prompt: bool) -> None:
    from transformers import PreTrainedTokenizerFast

    oracle = PreTrainedTokenizerFast(
        tokenizer_object=TOKENIZER, bos_token="<s>", eos_token="</s>", chat_template=source
    )
    expected = oracle.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    found = template.render(MESSAGES, add_generation_prompt=add_generation_prompt, arguments={})
    assert found == expected


def test_arguments_reach_the_template_but_replace_nothing() -> None:
    assert render(QWEN, {"enable_thinking": False}).endswith("<think></think>")
    assert "a < b" in render(QWEN, {"messages": []})


def test_dates_are_of_today() -> None:
    assert render("{{ strftime_now('%Y') }}") == datetime.now().strftime("%Y")


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ messages + 3 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append('x') }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_what_fails_or_reaches_out_is_the_callers_error(source: str) -> None:
    with pytest.raises(BadInput, match="chat template refuses"):
        render(source)


def test_a_template_that_is_none_is_the_models_error() -> None:
    with pytest.raises(ModelError, match="chat template cannot be read"):
        render("{% for %}")


# --- from a checkpoint's files -------------------------------------------------


def test_the_templates_own_file_goes_first() -> None:
    files = {**text_files(), "chat_template.jinja": b"from the file"}
    lingo = read_lingo(files, {"vocab_size": VOCAB})
    assert lingo.template
    assert lingo.template.source == "from the file"


def test_of_several_templates_the_default_is_taken() -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    files = {**text_files(), "tokenizer_config.json": json.dumps({"chat_template": named}).encode()}
    lingo = read_lingo(files, {"vocab_size": VOCAB})
    assert lingo.template
    assert lingo.template.source == "d"


def test_ends_come_from_the_generation_config_and_the_tokenizer() -> None:
    files = text_files()
    assert read_lingo(files, {"vocab_size": VOCAB, "eos_token_id": 9}).eos == (1, 9)
    files["generation_config.json"] = b'{"eos_token_id": [5, 7]}'
    assert read_lingo(files, {"vocab_size": VOCAB, "eos_token_id": 9}).eos == (1, 5, 7)


def test_a_file_that_is_no_json_is_named() -> None:
    files = {**text_files(), "generation_config.json": b"{"}
    with pytest.raises(ModelError, match=re.escape("generation_config.json")):
        read_lingo(files, {"vocab_size": VOCAB})
