"""Turn conversations into token ids and loss masks, by Jinja chat templates.

Promises: the ids before the first answer, and the text before later ones, are those of a rollout
for the same messages, unless `{% generation %}` blocks are used. The loss mask is 1 on every
assistant turn, up to and including the token that ends it, and 0 elsewhere. Every function raises
`ConfigError` if there is no chat template, it fails, or the answers cannot be located in the text.
Answers are found by rendering the conversation up to and after each answer; every rendering must
continue the previous one. If a template rewrites earlier turns, its own `{% generation %}` blocks
are used.
Equal messages give equal text on every day and machine; there is no clock, so a template that
requires `strftime_now` is refused. Templates come with models, so they run in Jinja's immutable
sandbox. Template errors become one line that names the template's line.
Does not promise: that the template is the one the model was trained with. Renders what
transformers renders for text, images and tools, but no documents. If a template fails on calls in
transformers' form, the other forms of `_NULLS` and `_ARGUMENTS` are tried.
"""

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import compress, product
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engines.data.read.rows import IMAGE_MARK, Message
from engines.data.read.tokenizer import ChatTokenizer, encode_texts, template_source
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
"""Role tokens begin turns, `<|end|>` ends answers: `<|user|>12+34=<|assistant|>640<|end|>`."""

# Private-use characters mark the assistant's spans; they are removed before tokenization.
_SPAN_START, _SPAN_END = "\U000f0000", "\U000f0001"
_FAILURES = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError)
"""Exceptions that a template may raise."""
_NULLS: tuple[dict[str, Any], ...] = ({}, {"content": None}, {"content": ""})
"""Forms of the content of a message that has only calls: absent (transformers), null (DeepSeek's
templates), or empty text (templates that append to it)."""
_ARGUMENTS: tuple[Callable[[str], Any], ...] = (json.loads, str)
"""Forms of a call's arguments: an object (transformers), or JSON text (DeepSeek's templates append
it)."""


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation; `spans` are character ranges of its `{% generation %}` blocks."""

    text: str
    spans: tuple[tuple[int, int], ...]


def render(
    template: str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = False,
    special_tokens: Mapping[str, str] | None = None,
) -> Rendered:
    """Render messages with a chat template, which may use `special_tokens` such as `eos_token`.

    Raises:
        ConfigError: the template does not compile or fails; names line and message.
    """
    compiled = _compiled(_ENVIRONMENT, template, "model.chat_template")
    others = {
        "tools": [json.loads(tool) for each in messages[:1] for tool in each.tools] or None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **(special_tokens or {}),
    }

    nulls = _NULLS if any(message.content_is_null for message in messages) else _NULLS[:1]
    arguments = _ARGUMENTS if any(message.tool_calls for message in messages) else _ARGUMENTS[:1]
    failed: list[Exception] = []
    for form in product(nulls, arguments):
        try:
            turns = [_turn(message, *form) for message in messages]
            return _take_spans(compiled.render(messages=turns, **others))
        except _FAILURES as error:
            failed.append(error)
    roles = ", ".join(message.role for message in messages)
    raise ConfigError(
        "model.chat_template",
        f"{_located(failed[0])}; rendering {len(messages)} messages ({roles}); need a template for "
        "these roles",
    )


def _content(message: Message) -> str | list[dict[str, str]]:
    if not message.images:
        return message.content
    parts = []
    for text in message.content.split(IMAGE_MARK):
        parts += ({"type": "image"}, {"type": "text", "text": text})
    return [part for part in parts[1:] if part.get("text") != ""]


def _turn(
    message: Message, null: dict[str, Any], arguments: Callable[[str], Any]
) -> dict[str, Any]:
    """Return the message as templates expect it, without empty keys."""
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
    """Render a template of a recipe in the same sandbox; an undefined name is an error.

    Raises:
        ConfigError: the template at `setting` does not compile or fails; names the line.
    """
    try:
        return _compiled(_STRICT, template, setting).render(**values)
    except _FAILURES as error:
        raise ConfigError(
            setting, f"{_located(error)}; need a text of: {', '.join(sorted(values))}"
        ) from None


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`: marks the span that the assistant writes."""

    tags = {"generation"}  # noqa: RUF012 - the attribute Jinja reads

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_SPAN_START}{caller()}{_SPAN_END}"


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


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


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
)
_ENVIRONMENT.filters["tojson"] = _to_json
_ENVIRONMENT.globals["raise_exception"] = _raise_exception
_STRICT = _ENVIRONMENT.overlay(undefined=jinja2.StrictUndefined)


@lru_cache(maxsize=16)
def _compiled(environment: jinja2.Environment, template: str, setting: str) -> jinja2.Template:
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            setting, f"line {error.lineno}: {error.message}; need valid Jinja"
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


def _located(error: Exception) -> str:
    """Return the error with the line of the template."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"line {each.lineno}: " for each in frames if each.filename == "<template>"]
    return f"{''.join(lines[-1:])}{type(error).__name__}: {error}"


@dataclass(frozen=True)
class RenderedConversation:
    """A tokenized conversation; `loss_mask` is 1 where a token is trained on, else 0."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]


def prompt_text(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> str:
    """Return the prompt's text, ending with the opening of the assistant's turn."""
    return _render_all(tokenizer, messages, add_generation_prompt=True).text


def render_prompts(
    tokenizer: ChatTokenizer, prompts: Sequence[Sequence[Message]]
) -> list[tuple[int, ...]]:
    """Return the token ids of prompts, each ending with the opening of the assistant's turn."""
    return encode_texts(tokenizer, [prompt_text(tokenizer, messages) for messages in prompts])


def render_whole(
    tokenizer: ChatTokenizer, conversations: Sequence[Sequence[Message]]
) -> list[tuple[int, ...]]:
    """Return the token ids of whole conversations, equal to transformers' `apply_chat_template`."""
    return encode_texts(tokenizer, [_render_all(tokenizer, each).text for each in conversations])


def render_sft(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> RenderedConversation:
    """Return the token ids and loss mask of a conversation that ends with the assistant."""
    return render_conversations(tokenizer, [messages])[0]


def render_conversations(
    tokenizer: ChatTokenizer, conversations: Sequence[Sequence[Message]]
) -> list[RenderedConversation]:
    """Return the token ids and loss masks of many conversations; see `render_sft`."""
    pieces = [_pieces(tokenizer, messages) for messages in conversations]
    ids = iter(encode_texts(tokenizer, [text for row in pieces for text, _ in row]))
    special = frozenset(tokenizer.all_special_ids)
    rendered = []
    for row in pieces:
        input_ids: list[int] = []
        loss_mask: list[int] = []
        for _, is_answer in row:
            piece = next(ids)
            trained = _end_of_turn(piece, tokenizer.eos_token_id, special) if is_answer else 0
            loss_mask += [int(place < trained) for place in range(len(piece))]
            input_ids += piece
        # No position predicts the first token of a sequence.
        if loss_mask:
            loss_mask[0] = 0
        rendered.append(RenderedConversation(tuple(input_ids), tuple(loss_mask)))
    return rendered


def end_of_turn_id(tokenizer: ChatTokenizer) -> int | None:
    """Return the token that ends an assistant's turn in this template, where a rollout stops.

    It is the end-of-sequence token if the template writes it, else the turn's last special token
    (a base model whose template ends turns with another token); None if there is neither.
    """
    conversation = render_sft(tokenizer, [Message("user", "1"), Message("assistant", "2")])
    trained = [*compress(conversation.input_ids, conversation.loss_mask)]
    last = trained[-1] if trained else None
    return last if last == tokenizer.eos_token_id or last in tokenizer.all_special_ids else None


def _pieces(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> list[tuple[str, bool]]:
    """Split the conversation's text into pieces, each with True if the assistant writes it."""
    pieces: list[tuple[str, bool]] = []
    done = ""
    for place, message in enumerate(messages):
        if message.role != "assistant":
            continue
        prompt = _render(tokenizer, messages[:place], add_generation_prompt=True).text
        # The last rendering holds all messages, so it alone is checked for left-out parts.
        rendered = _render_all if place == len(messages) - 1 else _render
        answered = rendered(tokenizer, messages[: place + 1]).text
        if not prompt.startswith(done) or not answered.startswith(prompt):
            return _marked_pieces(_render(tokenizer, messages))
        pieces += ((prompt[len(done) :], False), (answered[len(prompt) :], True))
        done = answered
    return [piece for piece in pieces if piece[0]]


def _marked_pieces(rendered: Rendered) -> list[tuple[str, bool]]:
    if not rendered.spans:
        raise ConfigError(
            "model.chat_template",
            "renders earlier turns differently once a conversation continues, so its answers "
            "cannot be located; need {% generation %} blocks around them, or rows with one answer",
        )
    pieces: list[tuple[str, bool]] = []
    done = 0
    for start, end in rendered.spans:
        pieces += ((rendered.text[done:start], False), (rendered.text[start:end], True))
        done = end
    return [piece for piece in (*pieces, (rendered.text[done:], False)) if piece[0]]


def _end_of_turn(piece: Sequence[int], eos_token_id: int | None, special: frozenset[int]) -> int:
    """Return the number of tokens up to and including the end of the turn; all if it has no end.

    A rollout stops there, so a line break that the template writes after it is never sampled.
    """
    for ends in ({eos_token_id}, special):
        places = [place for place, token in enumerate(piece, start=1) if token in ends]
        if places:
            return places[-1]
    return len(piece)


def _render(
    tokenizer: ChatTokenizer, messages: Sequence[Message], *, add_generation_prompt: bool = False
) -> Rendered:
    template = template_source(tokenizer.chat_template, any(each.tools for each in messages))
    if template is None:
        raise ConfigError(
            "model.chat_template", "the tokenizer has no chat template; set model.chat_template"
        )
    return render(
        template,
        messages,
        add_generation_prompt=add_generation_prompt,
        special_tokens={k: str(v) for k, v in tokenizer.special_tokens_map.items()},
    )


def _render_all(
    tokenizer: ChatTokenizer, messages: Sequence[Message], *, add_generation_prompt: bool = False
) -> Rendered:
    whole = _render(tokenizer, messages, add_generation_prompt=add_generation_prompt)
    if all(message.is_plain and message.role != "tool" for message in messages):
        return whole
    for without, lost, remedy in _PARTS:
        less = [without(message) for message in messages]
        if less == list(messages):
            continue
        try:
            rest = _render(tokenizer, less, add_generation_prompt=add_generation_prompt)
        except ConfigError:
            continue  # the template requires the part, so it does not leave it out
        if rest.text == whole.text:
            raise ConfigError(
                "model.chat_template",
                f"leaves out {lost}; need one that writes {remedy}; set another, or leave out such "
                "rows",
            )
    return whole


_PARTS: tuple[tuple[Callable[[Message], Message], str, str], ...] = (
    (
        lambda message: replace(message, content="") if message.role == "tool" else message,
        "what a tool returned",
        "messages of the role tool",
    ),
    (lambda message: replace(message, tool_calls=()), "what the assistant calls", "tool_calls"),
    (lambda message: replace(message, tools=()), "the tools that are offered", "tools"),
    (
        lambda message: (
            replace(message, content=message.content.replace(IMAGE_MARK, ""), images=())
            if message.images
            else message
        ),
        "images",
        "a placeholder for each part of the type image",
    ),
)
"""Parts that a template may leave out, since many know only three roles and text. Each entry: a
function that removes the part from a message, its description, and what a template must write."""
