# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Chat templates that write turns as published ones do, and a tokenizer that has their special tokens.

Reduced from what the model cards' tokenizer_config.json publish (Qwen: Apache-2.0; Llama 3.2's as in llama.cpp's
models/templates), written anew: tool calls, lists of tools and images are left out. What a template adds to, takes from
or refuses of a conversation is kept.
"""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_PARTS = {
    "SAY": "{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}",
    "TOOL": """
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}""",
    "QUERY": """
{%- set ns = namespace(steps=true, query=messages|length - 1) %}
{%- for m in messages[::-1] %}
{%- if ns.steps and m.role == 'user' and not m.content.startswith('<tool_response>') %}
{%- set ns.steps = false %}{%- set ns.query = messages|length - 1 - loop.index0 %}
{%- endif %}
{%- endfor %}""",
    "SPLIT": """
{%- set thought = '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}""",
    "THINK": "{%- set content = '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content %}",
    "OPEN": "{{- '<|im_start|>assistant\\n' }}",
    "BEGUN": "{{- '<think>\\n' }}",
    "EMPTY": "{{- '<think>\\n\\n</think>\\n\\n' }}",
}


def _made(template):
    for name, part in _PARTS.items():
        template = template.replace(name, part)
    return template


# An unknown role is left out without a word.
QWEN3_INSTRUCT_2507 = _made("""
{%- for m in messages %}{%- set content = m.content %}
{%- if m.role in ('user', 'system', 'assistant') %}SAY{%- elif m.role == 'tool' %}TOOL{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}OPEN{%- endif %}""")
# And without a system message it writes one of its own.
QWEN25 = (
    "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}{%- endif %}"
    + QWEN3_INSTRUCT_2507
)
# Thoughts before the last question are dropped; the last message of all gets one, empty if need be.
QWEN3 = _made("""QUERY
{%- for m in messages %}{%- set content = m.content %}
{%- if m.role in ('user', 'system') %}SAY
{%- elif m.role == 'assistant' %}SPLIT
{%- if loop.index0 > ns.query and (loop.last or thought) %}THINK{%- endif %}SAY
{%- elif m.role == 'tool' %}TOOL{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}OPEN
{%- if enable_thinking is defined and not enable_thinking %}EMPTY{%- endif %}{%- endif %}""")
QWEN3_THINKING_2507 = QWEN3[: QWEN3.rindex("{%- if enable_thinking")] + _made("BEGUN{%- endif %}")
# Text is stripped; every turn after the last question has a thought; a system message comes first or is an error.
QWEN35 = _made("""QUERY
{%- if ns.steps %}{{- raise_exception('No user query found in messages.') }}{%- endif %}
{%- for m in messages %}{%- set content = m.content|trim %}
{%- if m.role == 'system' and not loop.first %}{{- raise_exception('System message must be at the beginning.') }}
{%- elif m.role in ('user', 'system') %}SAY
{%- elif m.role == 'assistant' %}SPLIT{%- if loop.index0 > ns.query %}THINK{%- endif %}SAY
{%- elif m.role == 'tool' %}TOOL
{%- else %}{{- raise_exception('Unexpected message role.') }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}OPEN{%- if enable_thinking is true %}BEGUN{%- else %}EMPTY{%- endif %}{%- endif %}""")
# Text is stripped, a tool's is JSON; the head has a date.
LLAMA3 = """{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: 26 Jul 2024\\n\\n<|eot_id|>' }}
{%- for m in messages %}
{%- if m.role in ('ipython', 'tool') %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content|tojson + '<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content|trim + '<|eot_id|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# Qwen's; Llama 3's takes line ends together as well, so what follows an opening does not change its tokens.
_WORDS = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>"]
_SPECIAL += ["<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"]


def tokenizer_of(template, *, eos="<|im_end|>", ends=()):
    """A byte-level BPE tokenizer with a chat template. ends: further tokens that end a response."""
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(_WORDS, "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["the answer is in the other room, the door is open\n\n\n\n" * 20], trainer)
    backend.add_tokens(["<think>", "</think>", "<tool_response>", "</tool_response>"])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token="<|begin_of_text|>")
    made.chat_template = template
    made.ends = tuple(made.convert_tokens_to_ids([eos, *ends]))
    return made
