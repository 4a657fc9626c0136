"""Request and response bodies of OpenAI's API, and their translation for a rollout engine.

Source: OpenAI's API reference, `POST /v1/completions` and `POST /v1/chat/completions`.
Promises: an unknown field is refused and not ignored, since it may change what is sampled; token
ids, logprobs and the version of the weights are returned beside the text.
Not covered: streams, tools, images, penalties, several prompts in one call.
"""

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from engines.config.base import StrictModel
from engines.data.read.chat import render_prompts
from engines.data.read.rows import Message
from engines.data.read.tokenizer import DirectoryTokenizer
from engines.types import Completion, RolloutRequest, SamplingParams, StructuredOutput

MODEL = "policy"
"""Name of the served model: the current weights of the run."""


class JsonSchema(StrictModel):
    """`response_format.json_schema`."""

    name: str = ""
    strict: bool | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(StrictModel):
    """`response_format`: free text, or JSON of a schema."""

    type: Literal["text", "json_schema"]
    json_schema: JsonSchema | None = None


class SamplingBody(StrictModel, ABC):
    """Fields that both calls share."""

    model: Literal["policy"]
    n: int = Field(default=1, ge=1, le=1024)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """Not part of OpenAI's API; 0 switches it off."""
    stop: str | tuple[str, ...] | None = None
    seed: int | None = None
    """Null: a random seed."""
    user: str | None = None
    """Requests of one user form a session."""
    stream: Literal[False] | None = None
    response_format: ResponseFormat | None = None

    @property
    @abstractmethod
    def limit(self) -> int | None:
        """Maximum of sampled tokens; None: what the context leaves."""

    @abstractmethod
    def prompt_ids(self, tokenizer: DirectoryTokenizer) -> tuple[int, ...]:
        """Return the token ids of the prompt."""


class CompletionBody(SamplingBody):
    """Body of `/v1/completions`."""

    prompt: str | tuple[int, ...]
    max_tokens: int | None = Field(default=16, ge=1)
    logprobs: Literal[0] | None = None
    """Logprobs of the sampled tokens are always returned."""

    @property
    def limit(self) -> int | None:
        """See the base class."""
        return self.max_tokens

    def prompt_ids(self, tokenizer: DirectoryTokenizer) -> tuple[int, ...]:
        """See the base class; no special tokens are added to a text."""
        if isinstance(self.prompt, str):
            return tuple(tokenizer.encode(self.prompt, add_special_tokens=False))
        return self.prompt


class ChatMessage(StrictModel):
    """One message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class ChatBody(SamplingBody):
    """Body of `/v1/chat/completions`."""

    messages: tuple[ChatMessage, ...] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    """Logprobs are always returned."""

    @property
    def limit(self) -> int | None:
        """See the base class."""
        return self.max_completion_tokens or self.max_tokens

    def prompt_ids(self, tokenizer: DirectoryTokenizer) -> tuple[int, ...]:
        """See the base class; rendered like the prompts of training."""
        messages = [Message(role=each.role, content=each.content) for each in self.messages]
        return render_prompts(tokenizer, [messages])[0]


def rollout_request(
    body: SamplingBody, name: str, tokenizer: DirectoryTokenizer, context_length: int
) -> RolloutRequest:
    """Translate a body into a rollout request with id `name`, which the engine may still refuse."""
    prompt_ids = body.prompt_ids(tokenizer)
    seed = secrets.randbits(62) if body.seed is None else body.seed % 2**62
    form = body.response_format and body.response_format.json_schema
    return RolloutRequest(
        name,
        prompt_ids,
        SamplingParams(
            max_new_tokens=body.limit or context_length - len(prompt_ids),
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            stop=(body.stop,) if isinstance(body.stop, str) else body.stop or (),
            structured_output=(
                StructuredOutput(json_schema=json.dumps(form.schema_)) if form else None
            ),
        ),
        tuple(seed + index for index in range(body.n)),
        session=body.user,
    )


def answer(
    body: SamplingBody,
    request: RolloutRequest,
    completions: Sequence[Completion],
    tokenizer: DirectoryTokenizer,
    time_s: int,
) -> dict[str, Any]:
    """Return the response body; `time_s` is the time of the call in seconds since the epoch."""
    is_chat = isinstance(body, ChatBody)
    num_sampled = sum(len(completion.token_ids) for completion in completions)
    versions = [version for each in completions for version, _ in each.tokens.version_runs]
    return {
        "id": request.request_id,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": time_s,
        "model": MODEL,
        "system_fingerprint": f"version={max(versions, default=-1)}",
        "choices": [_choice(completion, tokenizer, is_chat) for completion in completions],
        "usage": {
            "prompt_tokens": len(request.prompt_ids),
            "completion_tokens": num_sampled,
            "total_tokens": len(request.prompt_ids) + num_sampled,
        },
    }


def _choice(completion: Completion, tokenizer: DirectoryTokenizer, is_chat: bool) -> dict[str, Any]:
    token_ids, values = completion.token_ids.tolist(), completion.logprobs.tolist()
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    tokens = [tokenizer.decode([token]) for token in token_ids]
    logprobs: dict[str, Any]
    if is_chat:
        pairs = zip(tokens, values, strict=True)
        rows = [{"token": token, "logprob": value, "top_logprobs": []} for token, value in pairs]
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text}}
        logprobs = {"content": rows}
    else:
        said = {"text": text}
        logprobs = {"tokens": tokens, "token_logprobs": values}
    return {
        "index": completion.sample_index,
        **said,
        "logprobs": logprobs,
        "finish_reason": completion.finish_reason,
        "token_ids": token_ids,
        "policy_versions": completion.policy_versions.tolist(),
    }
