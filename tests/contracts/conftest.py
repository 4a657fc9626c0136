"""Options of the contract tests: a stranger runs them on his own plugin by name."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", default="fsdp2", help="training backend (test_backend.py)")
    parser.addoption("--platform", default="cpu", help="hardware platform (test_platform.py)")
    parser.addoption("--reward", help="reward: a name or path/to/file.py:name (test_reward.py)")
    parser.addoption("--reward-cases", help="JSON lines of right, wrong, ground_truth (same)")
