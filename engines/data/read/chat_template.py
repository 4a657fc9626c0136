"""Rendering a Jinja chat template to text, and the template of models made from scratch.

Promises: the same messages give the same text on every day and machine (there is no clock: a
template that insists on `strftime_now` is refused); the template runs in Jinja's immutable
sandbox, since it comes with the model; its errors become one line that names the template line.
Renders what transformers renders for messages with text and images, calls of tools and what these
returned, and for the tools themselves; a template that fails on calls as transformers gives them is
given them in the other forms of `_NULLS` and `_ARGUMENTS`. Not supported: documents.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engines.data.read.rows import IMAGE_MARK, Message
from infra.errors import ConfigError

END_TOKEN = "<|end|>"  # noqa: S105 - a token of the vocabulary
PAD_TOKEN = "<|pad|>"  # noqa: S105
UNKNOWN_TOKEN = "<|unk|>"  # noqa: S105
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")

DEFAULT_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""One token per turn and one at the end of an answer: `<|user|>12+34=<|assistant|>640<|end|>`."""

# Characters of a private-use plane mark the assistant's spans; no tokenizer sees them.
_SPAN_START, _SPAN_END = "\U000f0000", "\U000f0001"


_FAILURES = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError)
"""What a template raises."""


_NULLS: tuple[dict[str, Any], ...] = ({}, {"content": None}, {"content": ""})
"""The content of a message that is nothing but calls: absent, as transformers has it; null, which
DeepSeek's templates ask for; or an empty text, for those that add to it."""
_ARGUMENTS: tuple[Callable[[str], Any], ...] = (json.loads, str)
"""Of a call, given their JSON text: an object, as transformers wants it for most templates, or the
text, which DeepSeek's append."""
_Form = tuple[dict[str, Any], Callable[[str], Any]]


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation.

    Attributes:
        text: what is tokenized.
        spans: (start, end) characters inside the template's `{% generation %}` blocks.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


def render(
    template: str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = False,
    special_tokens: Mapping[str, str] | None = None,
) -> Rendered:
    """Render messages.

    Args:
        template: Jinja source.
        messages: the conversation.
        add_generation_prompt: end with the opening of the assistant's turn.
        special_tokens: `bos_token`, `eos_token` ... as the template may use them.

    Returns:
        The text, and the spans the template marks itself.

    Raises:
        ConfigError: the template does not compile or raises; names line and message.
    """
    compiled = _compile(template)
    others = {
        "tools": [json.loads(tool) for each in messages[:1] for tool in each.tools] or None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **(special_tokens or {}),
    }

    def written(form: _Form) -> str:
        return compiled.render(messages=[_turn(message, form) for message in messages], **others)

    try:
        marked = _in_a_form(written, messages)
    except _FAILURES as error:
        roles = ", ".join(message.role for message in messages)
        raise ConfigError(
            "model.chat_template",
            f"{_where(error)}{type(error).__name__}: {error}; rendering {len(messages)} messages "
            f"({roles}); need a template for these roles",
        ) from None
    return _take_spans(marked)


def _in_a_form(written: Callable[[_Form], str], messages: Sequence[Message]) -> str:
    """What a template writes, given calls in the first form that it takes.

    If it takes none, what it raises is that of the first.
    """
    has_null = any(message.content_is_null for message in messages)
    has_calls = any(message.tool_calls for message in messages)
    failed: list[Exception] = []
    for form in product(_NULLS if has_null else _NULLS[:1], _ARGUMENTS[: 1 + has_calls]):
        try:
            return written(form)
        except _FAILURES as error:
            failed.append(error)
    raise failed[0]


def _content(message: Message) -> str | list[dict[str, str]]:
    """Text or, of a message with images, its parts."""
    if not message.images:
        return message.content
    first, *others = message.content.split(IMAGE_MARK)
    parts = [{"type": "text", "text": first}]
    for text in others:
        parts += ({"type": "image"}, {"type": "text", "text": text})
    return [part for part in parts if part.get("text") != ""]


def _turn(message: Message, form: _Form) -> dict[str, Any]:
    """A message as templates expect it: no key that says nothing."""
    null, arguments = form
    said = null if message.content_is_null else {"content": _content(message)}
    turn: dict[str, Any] = {"role": message.role, **said}
    if message.is_plain:
        return turn
    calls = [
        {
            **({"id": call.id} if call.id else {}),
            "type": "function",
            "function": {"name": call.name, "arguments": arguments(call.arguments)},
        }
        for call in message.tool_calls
    ]
    given = {"tool_calls": calls, "tool_call_id": message.tool_call_id, "name": message.name}
    return turn | {key: value for key, value in given.items() if value}


def render_text(template: str, values: Mapping[str, Any], setting: str) -> str:
    """Render a text of the user's, in the same sandbox.

    Args:
        template: Jinja source; a name that has no value is an error.
        values: by name.
        setting: where the template stands, for the error text.

    Returns:
        The text.

    Raises:
        ConfigError: the template does not compile or fails; names the line.
    """
    strict = _environment().overlay(undefined=jinja2.StrictUndefined)
    try:
        return strict.from_string(template).render(**values)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            setting, f"line {error.lineno}: {error.message}; need valid Jinja"
        ) from None
    except _FAILURES as error:
        raise ConfigError(
            setting,
            f"{_where(error)}{type(error).__name__}: {error}; need a text of: "
            f"{', '.join(sorted(values))}",
        ) from None


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`: puts marks around what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012 - the attribute Jinja reads

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_SPAN_START}{caller()}{_SPAN_END}"


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    try:
        return _environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            "model.chat_template", f"line {error.lineno}: {error.message}; need valid Jinja"
        ) from None


def _take_spans(marked: str) -> Rendered:
    spans: list[tuple[int, int]] = []
    pieces: list[str] = []
    length = 0
    for place, part in enumerate(marked.split(_SPAN_START)):
        inside, _, after = part.partition(_SPAN_END) if place else ("", "", part)
        if inside:
            spans.append((length, length + len(inside)))
        pieces += (inside, after)
        length += len(inside) + len(after)
    return Rendered("".join(pieces), tuple(spans))


def _where(error: Exception) -> str:
    """`line 7: ` if the traceback passes through the template."""
    line, traceback = None, error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return f"line {line}: " if line else ""


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
