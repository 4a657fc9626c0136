"""An HTTP server with OpenAI's API in front of one rollout engine, in the engine's event loop.

Source: OpenAI's API reference, `POST /v1/completions` and `POST /v1/chat/completions`.
Promises: it listens only on loopback and requires a key, stored in a file that only its owner can
read. An unknown field is refused and not ignored, since it may change what is sampled. Answers come
from confirmed weights, with token ids, logprobs and the version of the weights beside the text.
Before weights change, requests in flight are aborted and their callers told to retry.
Does not promise reproducible samples if an engine's samples depend on its batch: the requests of
HTTP clients and of the trainer share one. Not covered: streams, tools, images, penalties, several
prompts in one call.
"""

import itertools
import json
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from aiohttp import web
from pydantic import Field, ValidationError

from engines.checkpoint.model_directory import stated_context
from engines.config.base import StrictModel
from engines.data.read.chat import render_prompts
from engines.data.read.rows import Message
from engines.data.read.tokenizer import DirectoryTokenizer
from engines.errors import RolloutError
from engines.rollout.base import NEED_IDLE, RolloutEngine, wake
from engines.rollout.collect import collect
from engines.types import Completion, RolloutRequest, SamplingParams, StructuredOutput
from infra.errors import ConfigError, DeadlineError

MODEL = "policy"
"""Name of the served model: the current weights of the run."""
HOST = "127.0.0.1"
STOP_DEADLINE_S = 5.0
RETRY_AFTER_S = 1


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
        """Maximum number of sampled tokens; None: as many as fit into the context."""

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
    said: dict[str, Any] = {
        "text": text,
        "logprobs": {"tokens": tokens, "token_logprobs": values},
    }
    if is_chat:
        said = {
            "message": {"role": "assistant", "content": text},
            "logprobs": {
                "content": [
                    {"token": token, "logprob": value, "top_logprobs": []}
                    for token, value in zip(tokens, values, strict=True)
                ]
            },
        }
    return {
        "index": completion.sample_index,
        **said,
        "finish_reason": completion.finish_reason,
        "token_ids": token_ids,
        "policy_versions": completion.policy_versions.tolist(),
    }


class Endpoint:
    """The HTTP server of one engine; made by `serve`. Without confirmed weights it answers 503."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: DirectoryTokenizer,
        context_length: int,
        timeout_s: float,
        path: Path,
    ) -> None:
        self._engine, self._tokenizer, self._path = engine, tokenizer, path
        self._context_length, self._timeout_s = context_length, timeout_s
        self._key = secrets.token_urlsafe(32)
        self._numbers = itertools.count()
        self._in_flight: set[str] = set()
        self._admits = False
        self._num_changes = 0
        application = web.Application(middlewares=[self._guard])
        application.add_routes([
            web.get("/v1/models", self._models),
            web.post("/v1/completions", partial(self._serve, CompletionBody)),
            web.post("/v1/chat/completions", partial(self._serve, ChatBody)),
        ])  # fmt: skip
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=STOP_DEADLINE_S)

    async def start(self) -> None:
        """Listen, and write address and key as JSON to the file `path`, which is replaced."""
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, 0).start()
        host, port = self._runner.addresses[0][:2]
        told = {"base_url": f"http://{host}:{port}/v1", "api_key": self._key, "model": MODEL}
        self._path.unlink(missing_ok=True)
        with os.fdopen(
            os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w"
        ) as file:
            json.dump(told, file)

    async def call(self, name: str, arguments: Sequence[Any]) -> Any:
        """Call an engine method for the trainer; a `NEED_IDLE` one first aborts HTTP requests."""
        if name == "close":
            await self.stop()
        needs_idle = name in NEED_IDLE
        self._num_changes += needs_idle
        try:
            if needs_idle:
                await self._withdraw()
            call = partial(wake, self._engine) if name == "wake_up" else getattr(self._engine, name)
            result = await call(*arguments)
        finally:
            self._num_changes -= needs_idle
        # While another call waits for the engine to be idle, new requests are refused.
        self._admits = (await self._engine.health()).can_serve and not self._num_changes
        return result

    async def stop(self) -> None:
        """Stop serving and delete the file; may be repeated."""
        self._path.unlink(missing_ok=True)
        await self._withdraw()
        await self._runner.cleanup()

    async def _withdraw(self) -> None:
        self._admits = False
        if self._in_flight:
            await self._engine.abort(sorted(self._in_flight))

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(given.encode(), self._key.encode()):
            return _problem(401, "invalid_api_key", "the key is not the one of this endpoint")
        return await handler(request)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({
            "object": "list",
            "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "rlhf"}],
        })  # fmt: skip

    async def _serve(self, form: type[SamplingBody], request: web.Request) -> web.Response:
        time_s, name = int(time.time()), f"openai-{next(self._numbers)}"
        try:
            body = form.model_validate_json(await request.read())
            asked = rollout_request(body, name, self._tokenizer, self._context_length)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or "body"
            return _problem(400, "invalid_request_error", f"{field}: {first['msg']}")
        except ConfigError as error:
            return _problem(400, "invalid_request_error", str(error))
        if not self._admits:
            return _withdrawn()
        self._in_flight.add(name)
        try:
            [completions] = await collect(self._engine, [asked], self._timeout_s)
        except DeadlineError as error:
            return _problem(504, "timeout", str(error))
        except RolloutError as error:
            if not self._admits:
                return _withdrawn()
            return _problem(400, "invalid_request_error", str(error))
        finally:
            self._in_flight.discard(name)
        if any(completion.finish_reason == "abort" for completion in completions):
            return _withdrawn()
        return web.json_response(answer(body, asked, completions, self._tokenizer, time_s))


async def serve(engine: RolloutEngine, hf_dir: Path, timeout_s: float, path: Path) -> Endpoint:
    """Start an endpoint for an engine in the running loop; the caller stops it.

    Raises:
        ConfigError: the model has no tokenizer, or its configuration states no context length.
    """
    context_length = stated_context(hf_dir)
    if context_length is None:
        raise ConfigError(
            "rollout.openai_endpoint",
            f"got true; need a context in {hf_dir / 'config.json'}, such as "
            "max_position_embeddings; write it there, or set this to false",
        )
    endpoint = Endpoint(engine, DirectoryTokenizer.load(hf_dir), context_length, timeout_s, path)
    await endpoint.start()
    return endpoint


def _problem(status: int, kind: str, message: str, **headers: str) -> web.Response:
    return web.json_response(
        {"error": {"message": message, "type": kind, "code": kind}}, status=status, headers=headers
    )


def _withdrawn() -> web.Response:
    return _problem(
        503,
        "service_unavailable",
        "no weights are served now; try again",
        **{"Retry-After": str(RETRY_AFTER_S)},
    )
