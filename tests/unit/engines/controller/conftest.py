"""A tiny model with a tokenizer, workers on it, and Ray."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engines.checkpoint.model_directory import create_random_model
from engines.config.model import ArchitectureConfig, TokenizerConfig
from engines.config.rollout import RolloutConfig
from engines.config.training import OptimizerConfig, TrainingConfig
from engines.controller import launch
from engines.controller.model_worker import ModelWorker, WorkerSpec
from engines.data.prepare.tokenizer_training import train_tokenizer
from engines.training.spec import POLICY, ModelSource, RoleSpec
from infra import env
from infra.host import servers
from infra.ray.cluster import ensure_cluster


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tiny-policy")
    tokenizer_dir = train_tokenizer(
        TokenizerConfig(), ["0123456789+="], root / "tokenizer", max_length=32, chat_template=None
    )
    shape = ArchitectureConfig(
        hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64
    )
    create_random_model(shape, tokenizer_dir, 32, 5, root / "model")
    return root / "model"


@pytest.fixture
def policy_spec(model_dir: Path) -> WorkerSpec:
    return WorkerSpec(
        roles={
            POLICY: RoleSpec(
                ModelSource(model_dir),
                TrainingConfig(num_threads=1),
                OptimizerConfig(lr=1e-2),
                total_num_steps=10,
            )
        },
        serving_dir=model_dir,
        rollout=RolloutConfig(),
        temperature=1.0,
        platform="cpu",
        seed=0,
    )


@pytest.fixture
def start_worker() -> Iterator[Callable[[WorkerSpec], ModelWorker]]:
    workers: list[ModelWorker] = []

    def start(spec: WorkerSpec) -> ModelWorker:
        workers.append(ModelWorker(spec))
        workers[-1].initialize()
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


@pytest.fixture(scope="module")
def cluster(package_cluster: None, request: pytest.FixtureRequest) -> None:
    """Ray on loopback, to which this process is connected."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(request.module)


@pytest.fixture(scope="package")
def package_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One for all modules: Ray keeps state of the first cluster that a process connects to."""
    home = tmp_path_factory.mktemp("ray")
    names = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN")
    before = {name: env.child_environment().get(name) for name in names}
    for name in names:
        env.set_for_process(name, None)
    patch = pytest.MonkeyPatch()
    # The head listens on loopback only; jobs on it inherit this, a foreign process must say it.
    patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    started = ensure_cluster(home, num_cpus=4)
    import ray
    from ray._private import ray_constants

    patch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)
    env.set_for_process("RAY_ADDRESS", started.gcs_address)
    launch.connect_ray()
    yield
    ray.shutdown()
    patch.undo()
    env.set_for_process("RAY_ADDRESS", None)
    servers.end(home, "ray")
    for name, value in before.items():
        env.set_for_process(name, value)
