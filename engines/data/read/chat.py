"""Conversations to token ids and loss masks.

Promises: the ids before an answer are exactly those that a rollout gets for the same messages, so
supervised and RL training see the same prompt. The loss mask is 1 on every assistant turn, up to
and including the token that ends it, and 0 elsewhere. Every function raises `ConfigError` if
there is no chat template, it fails, or the answers cannot be told apart.
Answers are found by rendering the conversation up to and after each answer; every rendering must
continue the previous one. If a template rewrites earlier turns, its own `{% generation %}` blocks
are used.
Does not promise: that the template is the one the model was trained with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engines.data.read.chat_template import Rendered, render
from engines.data.read.rows import IMAGE_MARK, Message
from engines.data.read.tokenizer import ChatTokenizer, encode_texts, template_source
from infra.errors import ConfigError


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
    texts = [prompt_text(tokenizer, messages) for messages in prompts]
    return [tuple(ids) for ids in encode_texts(tokenizer, texts)]


def render_whole(
    tokenizer: ChatTokenizer, conversations: Sequence[Sequence[Message]]
) -> list[tuple[int, ...]]:
    """Return the token ids of whole conversations, equal to transformers' `apply_chat_template`."""
    texts = [_render_all(tokenizer, messages).text for messages in conversations]
    return [tuple(ids) for ids in encode_texts(tokenizer, texts)]


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
    pairs = zip(conversation.input_ids, conversation.loss_mask, strict=True)
    trained = [token for token, trained in pairs if trained]
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
            return _marked_pieces(tokenizer, messages)
        pieces += ((prompt[len(done) :], False), (answered[len(prompt) :], True))
        done = answered
    return [piece for piece in pieces if piece[0]]


def _marked_pieces(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> list[tuple[str, bool]]:
    rendered = _render(tokenizer, messages)
    if not rendered.spans:
        raise ConfigError(
            "model.chat_template",
            "renders a conversation differently once it goes on, so its answers cannot be told "
            "apart; need {% generation %} blocks around them, or rows with one answer each",
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
        for place in range(len(piece), 0, -1):
            if piece[place - 1] in ends:
                return place
    return len(piece)


def _render(
    tokenizer: ChatTokenizer, messages: Sequence[Message], *, add_generation_prompt: bool = False
) -> Rendered:
    offers_tools = any(message.tools for message in messages)
    template = template_source(tokenizer.chat_template, offers_tools)
    if template is None:
        raise ConfigError(
            "model.chat_template", "the tokenizer has no chat template; set model.chat_template"
        )
    special = {k: str(v) for k, v in tokenizer.special_tokens_map.items()}
    return render(
        template, messages, add_generation_prompt=add_generation_prompt, special_tokens=special
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


def _without_images(message: Message) -> Message:
    if not message.images:
        return message
    return replace(message, content=message.content.replace(IMAGE_MARK, ""), images=())


_PARTS: tuple[tuple[Callable[[Message], Message], str, str], ...] = (
    (
        lambda message: replace(message, content="") if message.role == "tool" else message,
        "what a tool returned",
        "messages of the role tool",
    ),
    (lambda message: replace(message, tool_calls=()), "what the assistant calls", "tool_calls"),
    (lambda message: replace(message, tools=()), "the tools that are offered", "tools"),
    (_without_images, "images", "a placeholder for each part of the type image"),
)
"""Parts that a template may leave out, since many know only three roles and text. Each entry: a
function that removes the part from a message, its description, and what a template must write.
"""
