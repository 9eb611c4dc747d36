"""Small tokenizers with the parts and chat layouts of Gemma 3, Mistral, SmolLM3 and OLMo.

The templates are short, but use the same statements of Jinja as the published ones and write turns
in the same format.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.policy import hf_folders
from tests.policy.hf_folders import added_token

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set opening = messages[0]['content'] + '\n\n' -%}
    {%- else -%}
        {%- set opening = messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- endif -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set opening = '' -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for turn in turns -%}
    {%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('roles must alternate') }}
    {%- endif -%}
    {{ '<start_of_turn>' + ('model' if turn['role'] == 'assistant' else turn['role']) + '\n'
       + (opening if loop.first else '') }}
    {%- if turn['content'] is string -%}
        {{ turn['content'] | trim }}
    {%- elif turn['content'] is iterable -%}
        {%- for item in turn['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- else -%}
        {{ raise_exception('content must be a text') }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""

# The first layout writes [INST] as text, the second as a token, and the system's text in the last
# turn of the user.
MISTRAL_1 = """{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for turn in turns %}
    {%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if turn['role'] == 'user' %}
        {%- if loop.first and system is defined %}
            {{- ' [INST] ' + system + '\n\n' + turn['content'] + ' [/INST]' }}
        {%- else %}
            {{- ' [INST] ' + turn['content'] + ' [/INST]' }}
        {%- endif %}
    {%- elif turn['role'] == 'assistant' %}
        {{- ' ' + turn['content'] + eos_token }}
    {%- else %}
        {{- raise_exception('no such role') }}
    {%- endif %}
{%- endfor %}"""
MISTRAL_3 = """{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set asked = turns | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for turn in turns %}
    {%- if not (turn.role == 'tool' or (turn.tool_calls is defined and turn.tool_calls)) %}
        {%- if (turn['role'] == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('roles must alternate') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for turn in turns %}
    {%- if turn['role'] == 'user' %}
        {%- if tools is not none and turn == asked[-1] %}{{- '[TOOLS]' + (tools | tojson) }}
        {%- endif %}
        {%- if loop.last and system is defined %}
            {{- '[INST] ' + system + '\n\n' + turn['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + turn['content'] + '[/INST]' }}
        {%- endif %}
    {%- elif turn['role'] == 'assistant' %}
        {{- ' ' + turn['content'] | trim + eos_token }}
    {%- else %}
        {{- raise_exception('no such role') }}
    {%- endif %}
{%- endfor %}"""

SMOLLM3 = """{%- if enable_thinking is not defined -%}
{%- set enable_thinking = true -%}
{%- endif -%}
{%- if enable_thinking -%}{%- set mode = '/think' -%}
{%- else -%}{%- set mode = '/no_think' -%}{%- endif -%}
{{- '<|im_start|>system\n' -}}
{%- if messages[0].role == 'system' -%}
    {%- set system = messages[0].content -%}
    {%- if '/no_think' in system -%}{%- set mode = '/no_think' -%}
    {%- elif '/think' in system -%}{%- set mode = '/think' -%}{%- endif -%}
    {%- set words = system.replace('/no_think', '').replace('/think', '').rstrip() -%}
{%- endif -%}
{%- if '/system_override' in system -%}
    {{- words.replace('/system_override', '').rstrip() -}}{{- '<|im_end|>\n' -}}
{%- else -%}
    {%- set today = strftime_now('%d %B %Y') -%}
    {{- '## Metadata\n\nToday Date: ' ~ today ~ '\n' -}}
    {{- 'Reasoning Mode: ' + mode + '\n\n' -}}
    {%- if words -%}{{- words + '\n\n' -}}
    {%- elif mode == '/think' -%}{{- 'Think about <think> first.\n\n' -}}{%- endif -%}
    {%- if xml_tools or python_tools -%}
        {%- set ns = namespace(text='') -%}
        {%- for tool in xml_tools[:] -%}
            {%- set ns.text = ns.text ~ (tool | string) ~ '\n' -%}
        {%- endfor -%}{{- ns.text -}}
    {%- endif -%}
    {{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for turn in messages -%}
    {%- set content = turn.content if turn.content is string else '' -%}
    {%- if turn.role == 'user' -%}
        {{ '<|im_start|>' + turn.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif turn.role == 'assistant' -%}
        {% generation %}
        {%- if mode == '/think' -%}
            {{ '<|im_start|>assistant\n' + content.lstrip('\n') + '<|im_end|>\n' }}
        {%- else -%}
            {{ '<|im_start|>assistant\n' + '<think>\n\n</think>\n' + content.lstrip('\n')
               + '<|im_end|>\n' }}
        {%- endif -%}
        {% endgeneration %}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|im_start|>assistant\n' + ('' if mode == '/think' else '<think>\n\n</think>\n') }}
{%- endif -%}"""

OLMO2 = (
    "{{ bos_token }}{% for turn in messages %}"
    "{% if turn['role'] in ('system', 'user') %}"
    "{{ '<|' + turn['role'] + '|>\n' + turn['content'] + '\n' }}"
    "{% elif not loop.last %}{{ '<|assistant|>\n' + turn['content'] + eos_token + '\n' }}"
    "{% else %}{{ '<|assistant|>\n' + turn['content'] + eos_token }}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
OLMO3 = (
    "{% set has_system = messages|selectattr('role', 'equalto', 'system')|list|length > 0 %}"
    "{% if not has_system %}{{ '<|im_start|>system\nBe of use.<|im_end|>\n' }}{% endif %}"
    "{% for turn in messages %}"
    "{% if turn['role'] == 'system' %}{{ '<|im_start|>system\n' + turn['content'] }}"
    "{% if turn.get('functions', none) is not none %}{{ turn['functions'] }}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% elif turn['role'] == 'user' %}"
    "{{ '<|im_start|>user\n' + turn['content'] + '<|im_end|>\n' }}"
    "{% elif turn['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% if turn.get('content', none) is not none %}{{ turn['content'] }}{% endif %}"
    "{% if not loop.last %}{{ '<|im_end|>' + '\n' }}{% else %}{{ eos_token }}{% endif %}"
    "{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}"
    "{% endfor %}"
)
# Content after the last </think> only, for all but the last turns, and a mark of an empty thought.
QWEN3 = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for turn in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and turn.role == 'user' and turn.content is string and not (
            turn.content.startswith('<tool_response>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for turn in messages %}
    {%- if turn.role == 'user' or (turn.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + turn.role + '\n' + turn.content + '<|im_end|>' + '\n' }}
    {%- elif turn.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if turn.reasoning_content is string %}{%- set thought = turn.reasoning_content %}
        {%- endif %}
        {{- '<|im_start|>' + turn.role + '\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- turn.content.lstrip('\n') + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""

_LETTERS = "abcdefghijklmnopqrstuvwxyzTMRDB<>/[]INS|_#:.,?!0123456789"
_MERGES = (("▁", "a"), ("a", "b"), ("▁", "t"), ("h", "e"), ("▁t", "he"))


def _byte_pieces() -> list[str]:
    return [f"<0x{i:02X}>" for i in range(256)]


def gemma() -> dict[str, Any]:
    """Return a BPE like Gemma 3's: no splitter but at spaces, and added tokens for white space."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    ordinary = ["\n", "\n\n", "▁▁", "▁▁▁", "<b>"]
    merges = (("\n", "\n"), ("▁", "▁"), ("▁▁", "▁"), ("▁", "▁▁"), *_MERGES, ("<", "b"), ("<b", ">"))
    pieces = [*special, *ordinary, *_byte_pieces(), "▁", *_LETTERS, *map("".join, merges)]
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    return {
        "version": "1.0",
        "added_tokens": [
            added_token(i, text, text in special) for i, text in enumerate([*special, *ordinary])
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}],
        },
        "model": hf_folders.fallback_bpe(pieces, [list(pair) for pair in merges]),
    }


def mistral(*markers: str) -> dict[str, Any]:
    """Return a BPE like Mistral's first models, with further control tokens `markers`."""
    special = ["<unk>", "<s>", "</s>", *markers]
    pieces = [*special, *_byte_pieces(), "▁", *_LETTERS, *map("".join, _MERGES)]
    words = hf_folders.byte_fallback()
    words["added_tokens"] = [added_token(i, text) for i, text in enumerate(special)]
    words["model"] |= {
        "vocab": {piece: i for i, piece in enumerate(dict.fromkeys(pieces))},
        "merges": [list(pair) for pair in _MERGES],
    }
    return words


def byte_level(*markers: str, words: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a byte-level BPE with the splitter of Llama 3, which SmolLM3 and OLMo share."""
    merges = (("Ġ", "a"), ("a", "b"), ("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ċ", "Ċ"))
    description = hf_folders.byte_level(markers=markers, words=words, merges=merges)
    split = description["pre_tokenizer"]["pretokenizers"][0]
    split["pattern"] = {
        "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    }
    return description | {"normalizer": None}


_TURNS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_THOUGHTS = ("<think>", "</think>")
# Name -> tokenizer.json, chat template, and texts of bos, eos and the tokens that end an answer.
LAYOUTS: dict[str, tuple[dict[str, Any], str, str | None, str, list[str]]] = {
    "gemma3": (gemma(), GEMMA, "<bos>", "<eos>", ["<eos>", "<end_of_turn>"]),
    "mistral v0.1": (mistral(), MISTRAL_1, "<s>", "</s>", ["</s>"]),
    "mistral v0.3": (mistral("[INST]", "[/INST]"), MISTRAL_3, "<s>", "</s>", ["</s>"]),
    "smollm3": (
        byte_level(*_TURNS, words=_THOUGHTS),
        SMOLLM3,
        None,
        "<|im_end|>",
        ["<|im_end|>"],
    ),
    "olmo2": (
        byte_level("<|endoftext|>", "<|pad|>"),
        OLMO2,
        "<|endoftext|>",
        "<|endoftext|>",
        ["<|endoftext|>"],
    ),
    "olmo3": (byte_level(*_TURNS), OLMO3, None, "<|endoftext|>", ["<|endoftext|>", "<|im_end|>"]),
    "qwen3": (byte_level(*_TURNS, words=_THOUGHTS), QWEN3, None, "<|im_end|>", ["<|im_end|>"]),
}


def write(folder: Path, name: str) -> Path:
    """Write the folder of a layout."""
    description, template, begin, end, _ = LAYOUTS[name]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": end,
        "chat_template": template,
    }
    return hf_folders.write(folder, description, config)
