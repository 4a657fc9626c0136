"""Tests of the scope that acts on an exception."""

import pytest

from infra.errors import ConfigError, on_failure


@pytest.mark.parametrize("error", [ConfigError("rl", "bad"), KeyboardInterrupt()])
def test_a_failing_scope_acts_once_and_goes_on(error: BaseException):
    seen: list[BaseException] = []
    with pytest.raises(type(error)) as caught, on_failure(seen.append):
        raise error
    assert seen == [error]
    assert caught.value is error


def test_a_scope_without_an_exception_does_nothing():
    seen: list[BaseException] = []
    with on_failure(seen.append):
        pass
    assert not seen


def test_an_error_of_the_act_names_the_first_one():
    def act(error: BaseException) -> None:
        raise OSError("disk")

    with pytest.raises(OSError, match="disk") as caught, on_failure(act):
        raise ConfigError("rl", "bad")
    assert isinstance(caught.value.__context__, ConfigError)
