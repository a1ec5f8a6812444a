"""Templates render as transformers renders them, and stay within bounds."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from checkpoint.chat_template import ChatTemplate, ChatTemplateError
from checkpoint.checkpoint import CheckpointError

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% else %}{% generation %} {{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
TOOLS = """
{%- if tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {%- if loop.last %}{% break %}{% endif %}
    {%- endfor %}
    {{- '</tools>\\n' }}
{%- endif %}
{%- set ns = namespace(n=0) %}
{%- for m in messages[::-1] %}
    {%- if m.role == 'tool' %}{% continue %}{% endif %}
    {%- set ns.n = ns.n + 1 %}
{%- endfor %}
{{- ns.n ~ ' ' ~ {'b': 1, 'a': '<é>'} | tojson(indent=2) }}
{% for m in messages %}
  {{ m.role }}: {{ m.content }}
{% endfor %}
"""
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "a < b & 'c' \"d\" é 👍"}],
    [
        {"role": "user", "content": " spaced "},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "line\nbreak"},
    ],
    [{"role": "user", "content": ""}, {"role": "assistant", "content": "x"}],
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.slow
@pytest.mark.parametrize("source", [CHATML, STRICT, TOOLS])
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_equals_transformers(
    source: str, messages: list[dict[str, Any]], prompt: bool, tools: list[dict[str, Any]] | None
) -> None:
    from jinja2.exceptions import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    template = ChatTemplate(source, variables=VARIABLES)
    try:
        (expected,), _ = render_jinja_template(
            conversations=[messages],
            chat_template=source,
            tools=tools,
            add_generation_prompt=prompt,
            **VARIABLES,
        )
    except TemplateError as error:
        with pytest.raises(ChatTemplateError, match=str(error)):
            template.render(messages, add_generation_prompt=prompt, tools=tools)
        return
    assert template.render(messages, add_generation_prompt=prompt, tools=tools) == expected


@pytest.mark.slow
@pytest.mark.parametrize("content", ["Well", "Well, ", "  Well"])
def test_going_on_with_the_last_message_equals_transformers(content: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "user", "content": "Well"}, {"role": "assistant", "content": content}]
    (expected,), _ = render_jinja_template(
        conversations=[messages], chat_template=CHATML, continue_final_message=True
    )
    assert ChatTemplate(CHATML).render(messages, continue_final_message=True) == expected


def test_rendering() -> None:
    text = ChatTemplate(CHATML).render(CONVERSATIONS[0])
    assert text == (
        "<|im_start|>system\nYou are helpful<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_generation_tag_is_its_body() -> None:
    assert ChatTemplate(STRICT, variables=VARIABLES).render(CONVERSATIONS[3]).endswith(" x</s>")


def test_date_of_today() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", now=lambda: datetime.datetime(2024, 5, 6, 7, 8))
    assert template.render([]) == "2024-05-06"


def test_extra_variables() -> None:
    template = ChatTemplate("{% if enable_thinking %}think{% else %}talk{% endif %}")
    assert template.render([]) == "talk"
    assert template.render([], variables={"enable_thinking": True}) == "think"


def test_not_a_template() -> None:
    with pytest.raises(CheckpointError, match="not valid Jinja"):
        ChatTemplate("{% for x in %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% for i in range(2000000) %}{% endfor %}",
        "{% for i in range(9000) %}{% for j in range(9000) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 999999999 }}",
        "{{ ['x'] * 999999999 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ messages | nosuchfilter }}",
    ],
)
def test_templates_that_do_harm_or_fail(source: str) -> None:
    with pytest.raises((ChatTemplateError, CheckpointError)):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


def test_time_is_bounded() -> None:
    ticks = iter(range(100))
    template = ChatTemplate("{% for i in range(50) %}{{ i }}{% endfor %}", clock=lambda: float(next(ticks)))
    with pytest.raises(ChatTemplateError, match="took over"):
        template.render([])
