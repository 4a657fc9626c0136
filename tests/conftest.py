"""What every test may count on, wherever the tests are started from."""

import signal


def pytest_configure() -> None:
    """Let SIGINT reach what tests start: a shell's background job, and its children, ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
