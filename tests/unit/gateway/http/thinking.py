"""A model that thinks."""

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% if opened %}<think>\n{% endif %}{% endif %}"
)
TEXT = "<think>\nwhy\n</think>\n\nso <think>"
