"""Conversations to token ids, and which of them a model learns to write.

Promises: the ids before an answer are exactly those a rollout is given for the same messages, so
supervised and reinforcement training see one and the same prompt; the loss mask is 1 on what
the assistant writes, up to and with the token that ends its turn, in every assistant turn, and 0
elsewhere. How the answers are found: the conversation is rendered up to and after each answer,
and every rendering must continue the one before. A template that rewrites earlier turns breaks
that; then its own `{% generation %}` blocks decide, and without them it is an error.
Does not promise: that a template is the one the model was trained with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engines.data.read.chat_template import Rendered, render
from engines.data.read.rows import IMAGE_MARK, Message
from engines.data.read.tokenizer import ChatTokenizer, encode_texts, template_source
from infra.errors import ConfigError


@dataclass(frozen=True)
class RenderedConversation:
    """A tokenized conversation.

    Attributes:
        input_ids: token ids.
        loss_mask: 1 where the token is trained on, else 0; of the same length.
    """

    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]


def prompt_text(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> str:
    """The prompt's text, ending with the opening of the assistant's turn.

    Args:
        tokenizer: with a chat template.
        messages: the prompt, the last one from the user.

    Returns:
        The text that `render_prompts` tokenizes.

    Raises:
        ConfigError: there is no chat template, or it fails.
    """
    return _render_all(tokenizer, messages, add_generation_prompt=True).text


def render_prompts(
    tokenizer: ChatTokenizer, prompts: Sequence[Sequence[Message]]
) -> list[tuple[int, ...]]:
    """Token ids of prompts, each ending with the opening of the assistant's turn.

    Args:
        tokenizer: with a chat template.
        prompts: the last message of each from the user.

    Returns:
        Ids of each prompt.

    Raises:
        ConfigError: there is no chat template, or it fails.
    """
    texts = [prompt_text(tokenizer, messages) for messages in prompts]
    return [tuple(ids) for ids in encode_texts(tokenizer, texts)]


def render_whole(
    tokenizer: ChatTokenizer, conversations: Sequence[Sequence[Message]]
) -> list[tuple[int, ...]]:
    """Token ids of whole conversations: what `apply_chat_template` of transformers gives.

    Args:
        tokenizer: with a chat template.
        conversations: the last message of each from the assistant.

    Returns:
        Ids of each conversation.

    Raises:
        ConfigError: there is no chat template, or it fails.
    """
    texts = [_render_all(tokenizer, messages).text for messages in conversations]
    return [tuple(ids) for ids in encode_texts(tokenizer, texts)]


def render_sft(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> RenderedConversation:
    """Token ids and loss mask of a conversation.

    Args:
        tokenizer: with a chat template.
        messages: the conversation, the last one from the assistant.

    Returns:
        Ids and mask, of equal length.

    Raises:
        ConfigError: there is no chat template, it fails, or the answers cannot be told apart.
    """
    return render_conversations(tokenizer, [messages])[0]


def render_conversations(
    tokenizer: ChatTokenizer, conversations: Sequence[Sequence[Message]]
) -> list[RenderedConversation]:
    """Token ids and loss masks of many conversations; see `render_sft`."""
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
            # The first token of a sequence has nothing to be predicted from.
            loss_mask += [int(place < trained) for place in range(len(piece))]
            input_ids += piece
        if loss_mask:
            loss_mask[0] = 0
        rendered.append(RenderedConversation(tuple(input_ids), tuple(loss_mask)))
    return rendered


def end_of_turn_id(tokenizer: ChatTokenizer) -> int | None:
    """The token that ends an assistant's turn in this template: what a rollout stops at.

    The end-of-sequence token where the template writes it, else the turn's last special token
    (a base model whose template closes turns with a token of its own); None if there is neither.
    """
    conversation = render_sft(tokenizer, [Message("user", "1"), Message("assistant", "2")])
    pairs = zip(conversation.input_ids, conversation.loss_mask, strict=True)
    trained = [token for token, trained in pairs if trained]
    last = trained[-1] if trained else None
    return last if last == tokenizer.eos_token_id or last in tokenizer.all_special_ids else None


def _pieces(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> list[tuple[str, bool]]:
    """The conversation's text in pieces, each with whether the assistant writes it."""
    pieces: list[tuple[str, bool]] = []
    done = ""
    for place, message in enumerate(messages):
        if message.role != "assistant":
            continue
        prompt = _render(tokenizer, messages[:place], add_generation_prompt=True).text
        # Of the parts of messages the whole tells: it ends with the last answer.
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
    """Tokens of an answer up to and with the one that ends it; all if none does.

    What a template writes after the end (a line break) is never sampled: a rollout stops before.
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
    """As `_render`; a template that leaves out a part of the messages is refused."""
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
            continue  # it looks at the part, and refuses messages without it
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
"""Many templates know three roles and text alone, and skip the rest: a message without the part,
what the part is, and what a template has to write."""
