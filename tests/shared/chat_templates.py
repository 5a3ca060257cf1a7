"""Chat templates as models have them, and two that use what else transformers offers."""

from __future__ import annotations

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA_3 = """\
{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|im_start|>system\\n\\nToday: " + date_string + "\\n\\n" + system_message + "<|im_end|>" }}
{%- for message in messages %}
    {%- if tools is none or not tools %}
    {{- '<|im_start|>' + message['role'] + '\\n\\n'+ message['content'] | trim + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n\\n' }}
{%- endif %}
"""
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("After the optional system message, roles must alternate user and assistant") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"] + eos_token}}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
"""
ODDS = """\
{% for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
{{ message | tojson }}
{{ {'b': ['<é>', 1.5, none], 'a': true} | tojson(indent=2) }}
    {% generation %}{{ message.content | trim }}{% endgeneration %}

    {# a comment #}
{% if loop.index > 2 %}{% break %}{% endif %}
{% endfor %}
{{ messages | length }} {{ (messages | map(attribute='role') | list) | tojson }}
{% macro twice(text) %}{{ text * 2 }}{% endmacro %}
{{ twice('ab') }}{{ dict(x=1).x }}
"""
REASONING = """\
{% for message in messages %}
{{ message.role }}{% if 'thinking' in message %}<think>{{ message.thinking }}</think>{% endif %}
{% if message.reasoning_content is string %}({{ message.reasoning_content }}){% endif %}{{ message.content }}
{{ message.keys() | list }}
{% endfor %}
"""
TEMPLATES = {
    "ChatML": CHATML,
    "Llama 3": LLAMA_3,
    "Mistral": MISTRAL,
    "odds": ODDS,
    "reasoning": REASONING,
}
