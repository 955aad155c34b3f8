"""The built-in chat templates, by name (Jinja, as `--chat_template_name` takes them)."""

from __future__ import annotations

_TULU = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|assistant|>\\n' + message['content'] + eos_token }}{{ '' if loop.last else '\\n' }}"
    "{% else %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{{ '<|assistant|>\\n' if add_generation_prompt }}"
)

# No space after the colon of the last line: in byte-level BPE it belongs to the word that follows.
_SIMPLE_CHAT = (
    "{% for message in messages %}"
    "{{ message['role'].capitalize() + ': ' + message['content'] }}"
    "{{ (eos_token if message['role'] == 'assistant' else '') + '\\n' }}"
    "{% endfor %}"
    "{{ 'Assistant:' if add_generation_prompt }}"
)

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{{ '<|im_start|>assistant\\n' if add_generation_prompt }}"
)

_LLAMA3 = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{ message['content'] | trim }}{{ '<|eot_id|>' }}"
    "{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' if add_generation_prompt }}"
)

CHAT_TEMPLATES: dict[str, str] = {
    "simple_chat": _SIMPLE_CHAT,  # User: ... / Assistant: ...<eos>
    "tulu": _TULU,  # Tülu: <|user|> and <|assistant|> in plain text, <eos> ends a reply
    "olmo": "{{ bos_token }}" + _TULU,  # OLMo 2: the same behind a <bos>
    "chatml": _CHATML,  # <|im_start|>role ... <|im_end|>
    "qwen": _CHATML,  # without Qwen 3's empty <think> block, which its own template writes
    "llama3": _LLAMA3,  # <|start_header_id|>role<|end_header_id|> ... <|eot_id|>
}

# Tokens that a template needs as single tokens of the tokenizer: a turn that never ends in one would never end.
REQUIRED_TOKENS: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "qwen": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}
