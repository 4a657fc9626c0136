"""Rendering templates: text, generation spans, refusals."""

import pytest

from engines.data.read.chat import DEFAULT_CHAT_TEMPLATE, Rendered, render
from engines.data.read.rows import Message
from infra.errors import ConfigError

CHAT = [Message("user", "12+34="), Message("assistant", "640")]


def test_the_default_template() -> None:
    assert render(DEFAULT_CHAT_TEMPLATE, CHAT).text == "<|user|>12+34=<|assistant|>640<|end|>"
    prompt = render(DEFAULT_CHAT_TEMPLATE, CHAT[:1], add_generation_prompt=True).text
    assert prompt == "<|user|>12+34=<|assistant|>"
    system = [Message("system", "s"), *CHAT, *CHAT]
    assert render(DEFAULT_CHAT_TEMPLATE, system).text == (
        "<|system|>s" + 2 * "<|user|>12+34=<|assistant|>640<|end|>"
    )


def test_generation_blocks_give_spans() -> None:
    template = (
        "{% for m in messages %}"
        "{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}!{% endgeneration %};"
        "{% else %}U:{{ m.content }};{% endif %}"
        "{% endfor %}"
    )
    assert render(DEFAULT_CHAT_TEMPLATE, CHAT).spans == ()
    assert render(template, CHAT * 2) == Rendered(
        "U:12+34=;A:640!;U:12+34=;A:640!;", ((11, 15), (27, 31))
    )


def test_what_transformers_offers_to_templates() -> None:
    template = (
        "{{ bos_token }}\n"
        "    {%- for m in messages -%}{{ m | tojson }}{% break %}{%- endfor -%}"
        "{{ strftime_now is defined }}"
    )
    text = render(
        template, [Message("user", "\u00e9<b>")], special_tokens={"bos_token": "<s>"}
    ).text
    assert text == '<s>{"role": "user", "content": "\u00e9<b>"}False'


def test_errors_name_the_line_and_the_roles() -> None:
    template = "\n{% if messages|length > 1 %}\n{{ raise_exception('one turn only') }}\n{% endif %}"
    with pytest.raises(ConfigError) as error:
        render(template, CHAT)
    assert str(error.value) == (
        "model.chat_template: line 3: TemplateError: one turn only; rendering 2 messages "
        "(user, assistant); need a template for these roles"
    )
    with pytest.raises(ConfigError, match=r"model\.chat_template: line 2: .*; need valid Jinja"):
        render("\n{% if %}", CHAT)
    with pytest.raises(ConfigError, match=r"line 1: UndefinedError: 'strftime_now' is undefined"):
        render("{{ strftime_now('%d') }}", CHAT)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_templates_run_in_a_sandbox(template: str) -> None:
    with pytest.raises(ConfigError, match="SecurityError"):
        render(template, CHAT)
