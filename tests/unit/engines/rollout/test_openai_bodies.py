"""What the bodies of OpenAI's API ask for."""

import pytest

from engines.rollout.openai_endpoint import ChatBody, CompletionBody, SamplingBody


def test_what_both_calls_have_is_no_call() -> None:
    with pytest.raises(TypeError, match="abstract class SamplingBody"):
        SamplingBody(model="policy")


def test_chat_has_two_token_limit_fields_and_completion_has_one() -> None:
    chat = {"model": "policy", "messages": [{"role": "user", "content": "1+2="}]}
    assert ChatBody.model_validate(chat).limit is None
    assert ChatBody.model_validate({**chat, "max_tokens": 5}).limit == 5
    both = {"max_tokens": 5, "max_completion_tokens": 7}
    assert ChatBody.model_validate({**chat, **both}).limit == 7
    assert CompletionBody(model="policy", prompt="1+2=").limit == 16
