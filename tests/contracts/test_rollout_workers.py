"""The contract of a rollout engine whose model is shared by two workers.

For the engine that `--engine` names, as in test_rollout_engine; one without the option
`tensor_parallel_size` is left out. Covered: every worker reads the weights, of which each keeps
its part; logprobs are those of the whole model after every update; a worker that gets other bytes
is found.
"""

import asyncio
from collections.abc import Iterator

import pytest
from rlhf.testing.rollout_models import changed, model, receipt_of, tensors_of
from rlhf.testing.served_engine import Served
from rlhf.testing.test_rollout_engine import MAX_LOGPROB_DIFFERENCE, engine_name

from engines.config.options import schema_of
from engines.config.plugins import ROLLOUT_ENGINES
from engines.errors import RolloutError, WeightSyncError
from engines.weight_sync.shared_memory import open_transport

__all__ = ["engine_name"]  # pytest finds the fixture by its name in this module

NUM_WORKERS = 2
TIMEOUT_S = 300.0
"""Each worker imports the engine's library anew."""


@pytest.fixture(scope="module")
def served(engine_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    schema = schema_of(ROLLOUT_ENGINES.place(engine_name), "rollout.options")
    try:
        assert schema is not None
        schema.model_validate({"tensor_parallel_size": NUM_WORKERS})
    except (AssertionError, ValueError):
        pytest.skip(f"needs an engine whose model workers can share; {engine_name} has one worker")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RLHF_FAULTS", raising=False)
        directory = tmp_path_factory.mktemp("workers")
        options = {"tensor_parallel_size": NUM_WORKERS}
        made = Served(engine_name, False, directory, TIMEOUT_S, options=options)
    yield made
    made.close()


def test_it_says_how_many_read(served: Served) -> None:
    assert served.engine.num_workers == NUM_WORKERS


def test_every_update_is_served_whole(served: Served) -> None:
    made = model(False, 1)
    served.send(made, 0)
    assert served.parity(made) <= MAX_LOGPROB_DIFFERENCE
    for version, group in enumerate(("projections", "embedding", "head"), 1):
        made = changed(made, group, version)
        served.send(made, version)
        assert served.parity(made) <= MAX_LOGPROB_DIFFERENCE


def test_each_worker_reads_a_source_of_its_own(served: Served) -> None:
    made = model(False, 5)
    tensors = tensors_of(made)
    transport = open_transport("float32", frozenset(), 60.0, "127.0.0.1", [NUM_WORKERS])

    async def sync():
        sending = asyncio.to_thread(transport.send, iter(tensors.items()))
        (source,) = transport.sources
        held, sent = await asyncio.gather(served.engine.update_weights(source, 7), sending)
        assert held == sent == receipt_of(tensors)
        await served.engine.finish_update(7, sent.digest)

    try:
        served.run(sync())
    finally:
        transport.stop()
    assert served.parity(made) <= MAX_LOGPROB_DIFFERENCE


def test_what_is_not_whole_is_refused_and_the_next_one_works(served: Served) -> None:
    made = model(False, 1)
    tensors = tensors_of(made)
    first = served.source(dict(list(tensors.items())[:-1]))
    with pytest.raises(WeightSyncError):
        served.run(served.engine.update_weights(first, 8))
    with pytest.raises(RolloutError):
        served.parity(made)
    served.send(made, 9)
    assert served.parity(made) <= MAX_LOGPROB_DIFFERENCE
