"""Parts of an algorithm by name: options, unknown names, parts of others and their facts."""

import inspect
from pathlib import Path

import pytest
from pydantic import Field
from rlhf.testing.algorithm_samples import estimate_B

from engines.algorithms.policy_objective import policy_loss_fn
from engines.config import options as options_module
from engines.config.algorithm import AlgorithmConfig
from engines.config.base import StrictModel
from engines.config.options import NoOptions, check_options, check_parts, own_options
from engines.config.plugins import register_plugin
from engines.config.rows import ADVANTAGES, KL_ESTIMATORS, POLICY_LOSSES
from engines.config.rules.algorithm import check_algorithm
from engines.config.sections import RLConfig
from infra.errors import ConfigError, UnknownPluginError
from infra.plugins import Row


class TauOptions(StrictModel):
    tau: float = Field(default=1.0, gt=0)


class BetaOptions(StrictModel):
    beta: float


SCHEMAS = {"tau": TauOptions, "beta": BetaOptions, "none": NoOptions, "unsaid": None}


@pytest.fixture
def _schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options_module, "schema_of", lambda row, path: SCHEMAS[row.name])


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RLHF_USE_EXTERNAL_MODULES", raising=False)
    monkeypatch.setattr("infra.plugins._registered", [])
    monkeypatch.syspath_prepend(str(tmp_path))


def rows(*names: str) -> list[Row]:
    return [Row(name=name, target="x:Y") for name in names]


@pytest.mark.usefixtures("_schemas")
def test_options_go_to_the_schema_that_knows_them() -> None:
    given = {"beta": 2, "tau": 3}
    check_options(given, rows("tau", "beta"), "o")
    assert own_options(given, rows("tau")[0], "o") == TauOptions(tau=3.0)
    assert own_options(given, rows("beta")[0], "o") == BetaOptions(beta=2.0)
    check_options({"whatever": 1}, rows("none", "unsaid"), "o")


@pytest.mark.usefixtures("_schemas")
@pytest.mark.parametrize(
    ("options", "name", "path", "word"),
    [
        ({"tua": 1}, "tau", "rl.algorithm.options.tua", "did you mean tau"),
        ({"tau": 1}, "none", "rl.algorithm.options.tau", "known: none"),
        ({"tau": -1}, "tau", "rl.algorithm.options.tau", "need a finite number > 0"),
        ({}, "beta", "rl.algorithm.options.beta", "missing"),
    ],
)
def test_bad_options_name_their_path(
    options: dict[str, float], name: str, path: str, word: str
) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        check_options(options, rows(name), "rl.algorithm.options")
    assert caught.value.path == path


def test_an_unknown_name_says_the_nearest_and_lists_the_rest() -> None:
    with pytest.raises(UnknownPluginError) as caught:
        ADVANTAGES.find("gpro")
    text = str(caught.value)
    assert text.startswith("rl.algorithm.adv_estimator: no 'gpro'; known: ")
    assert "did you mean grpo?" in text
    assert "\n" not in text


@pytest.mark.parametrize("table", [ADVANTAGES, POLICY_LOSSES, KL_ESTIMATORS])
def test_every_row_states_its_source_and_its_function_a_formula(table) -> None:
    for row in table.rows:
        assert row.paper.strip()
        assert inspect.getdoc(table.load(row.name))


@pytest.mark.usefixtures("_alone")
def test_external_estimator_facts_are_known_without_import(tmp_path: Path) -> None:
    (tmp_path / "pairwise_part.py").write_text("raise OSError('imported')\n")
    (tmp_path / "pairwise_options.py").write_text(
        "from engines.config.base import StrictModel\n"
        "class Pairwise(StrictModel):\n    margin: float = 0.5\n"
    )
    register_plugin(
        "adv_estimator", "pairwise", "pairwise_part:advantages",
        group_relative=True, options="pairwise_options:Pairwise",
    )  # fmt: skip
    named = AlgorithmConfig(adv_estimator="pairwise", options={"margin": 1.0})
    with pytest.raises(ConfigError, match=r"rl\.group_size: got 1"):
        check_algorithm(RLConfig(algorithm=named, group_size=1))
    check_algorithm(RLConfig(algorithm=named, group_size=2))
    with pytest.raises(ConfigError, match="options.margn: not an option of pairwise and vanilla"):
        check_parts(AlgorithmConfig(adv_estimator="pairwise", options={"margn": 1.0}))
    with pytest.raises(
        ConfigError, match="has no such fact: no 'group_relativ'; .*mean group_relative"
    ):
        register_plugin("adv_estimator", "x", "y:z", group_relativ=True)


@pytest.mark.usefixtures("_alone")
def test_a_part_is_looked_up_once_per_process(tmp_path: Path) -> None:
    (tmp_path / "ones_part.py").write_text(
        "import torch\n"
        "from engines.algorithms.parts import Advantages\n"
        "def ones(inputs):\n"
        "    return Advantages.of_samples(torch.ones_like(inputs.outcomes_B), inputs.batch)\n"
    )
    register_plugin("adv_estimator", "ones_of_test", "ones_part:ones")
    import torch

    algorithm = AlgorithmConfig(adv_estimator="ones_of_test")
    scores_B, group_B = torch.tensor([1.0, 2.0]), torch.tensor([0, 0])
    assert estimate_B(algorithm, scores_B, group_B).tolist() == [1.0, 1.0]
    (tmp_path / "ones_part.py").unlink()
    assert estimate_B(algorithm, scores_B, group_B).tolist() == [1.0, 1.0]
    assert policy_loss_fn(algorithm, 8).required_columns == {"advantages", "loss_mask"}
