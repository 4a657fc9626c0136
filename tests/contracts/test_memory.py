"""What the memory audit counts on a backend, against formulas and resident memory.

`pytest --pyargs rlhf.testing.test_memory --backend NAME`, for the backends that the formulas
describe: parameters, gradients, moments and saved tensors at 1 and 8 micro-batches, 1 and 4 steps,
1, 2 and 4 ranks, with recomputed layers and without.
"""

from pathlib import Path

import pytest
from rlhf.testing.context import check_runnable
from rlhf.testing.memory_formulas import KNOWN
from rlhf.testing.memory_ranks import EXACT_MALLOC, check_ranks, run_ranks, write_models


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("memory")
    write_models(root)
    return root


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_audit_counts_what_ranks_hold(
    num_ranks: int, root: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_runnable(request.config)
    backend = request.config.getoption("--backend")
    if backend not in KNOWN:
        pytest.skip(f"no formula describes {backend}; known: {', '.join(KNOWN)}")
    for name, value in EXACT_MALLOC.items():
        monkeypatch.setenv(name, value)
    check_ranks(run_ranks(root, num_ranks, [backend], [backend]))
