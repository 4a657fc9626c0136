"""Create the preprocessor that a data source names."""

from typing import Any

from engines.config.data import SourceConfig
from engines.config.options import check_preprocessor, own_options
from engines.data.prepare.preprocessors.base import Preprocessor
from infra.plugins import load_row


def create_preprocessor(source: SourceConfig, field: str) -> Preprocessor[Any]:
    """Return the preprocessor of a source, with its options validated.

    Raises:
        UnknownPluginError: no preprocessor has that name.
        ConfigError: the name is ambiguous, the plugin does not load, or the options are invalid.
    """
    row = check_preprocessor(source, field)
    options = own_options(source.options, row, f"{field}.options")
    return load_row(row, f"{field}.format")(options)
