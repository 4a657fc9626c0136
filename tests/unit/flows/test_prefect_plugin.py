"""The short name of a deployment on Prefect's command line."""

import pytest

from flows.prefect_plugin import complete_deployment_name


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "prefect deployment run rlhf-pipeline",
            "prefect deployment run rlhf-pipeline/rlhf-pipeline",
        ),
        ("prefect deployment run a/b", "prefect deployment run a/b"),
        ("prefect deployment run --id 3", "prefect deployment run --id 3"),
        ("prefect deployment run", "prefect deployment run"),
        ("prefect deployment inspect x", "prefect deployment inspect x"),
        (
            "/venv/bin/prefect --no-prompt deployment run x -p a=b",
            "/venv/bin/prefect --no-prompt deployment run x/x -p a=b",
        ),
        ("python -m pytest deployment run x", "python -m pytest deployment run x"),
    ],
)
def test_only_a_bare_name_is_completed(before: str, after: str) -> None:
    argv = before.split()
    complete_deployment_name(argv)
    assert " ".join(argv) == after
