"""The pytest plugin of the contract tests: their options, wherever pytest is started."""

import pytest

pytest.register_assert_rewrite("rlhf.testing.expectations")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Names of what is tested."""
    group = parser.getgroup("rlhf", "contract tests of the RLHF pipeline's plugins")
    group.addoption("--backend", default="fsdp2", help="training backend (test_backend)")
    group.addoption(
        "--claims",
        default="",
        help="what a backend that is not built in can do beyond data parallelism, by commas: "
        "hybrid, ulysses, tensor, pipeline, virtual pipeline, context, expert, value_model, "
        "lora, moe (test_backend)",
    )
    group.addoption("--engine", default="transformers", help="rollout engine (test_rollout_*)")
    group.addoption("--platform", default="cpu", help="hardware platform (test_platform)")
    group.addoption("--tracker", help="tracker by name (test_tracker)")
    group.addoption("--tracker-uri", help="address of its service (same)")
    group.addoption("--tracker-reader", help="module:function that reads a run back (same)")
    group.addoption("--reward", help="reward: a name or path/to/file.py:name (test_reward)")
    group.addoption("--preprocessor", help="layout of raw rows (test_preprocessor)")
    group.addoption("--rows", help="JSON lines of raw rows (same)")
    group.addoption("--store", help="an empty store (test_store); by default one of each form")
    group.addoption("--reward-kwargs", help="JSON object of its arguments (same)")
    group.addoption("--reward-cases", help="JSON lines of right, wrong, ground_truth (same)")


def pytest_configure(config: pytest.Config) -> None:
    """Markers of the contract tests, for directories without this project's settings."""
    config.addinivalue_line("markers", "slow: minutes, not seconds; here: four ranks")
