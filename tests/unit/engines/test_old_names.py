"""Plugins that import a name of an earlier release still find it, with a warning."""

import importlib

import pytest

from engines.weight_sync import base


def test_old_name_of_the_weight_digest_works_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="Receipt is now WeightDigest"):
        from engines.weight_sync.base import Receipt
    assert Receipt is base.WeightDigest


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Recipe'"):
        base.Recipe  # noqa: B018


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("engines.config.rules.sizes", {"check_divides"}),
        ("engines.config.stages.inputs", {"ExternalInput", "model_input"}),
        ("engines.rollout.create", {"create_rollout_engine"}),
        ("engines.training.create", {"create_engine"}),
    ],
)
def test_a_module_that_moved_is_found_with_a_warning(module: str, names: set[str]) -> None:
    with pytest.warns(DeprecationWarning, match=f"{module} is now engines"):
        found = importlib.import_module(module)
    assert names <= vars(found).keys()
