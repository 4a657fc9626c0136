"""The preprocessor that a source of data names."""

from typing import Any

from engines.config.data import SourceConfig
from engines.config.options import check_preprocessor, own_options
from engines.data.prepare.preprocessors.base import Preprocessor
from infra.plugins import load_row


def create_preprocessor(source: SourceConfig, field: str) -> Preprocessor[Any]:
    """The preprocessor of a source, with its options validated.

    Args:
        source: its `format` and `options`.
        field: the source's place in the configuration, for errors (`data.rl.0`).

    Returns:
        Ready to read rows.

    Raises:
        UnknownPluginError: no preprocessor has that name.
        ConfigError: two have it, it does not load, or the options are not its options.
    """
    row = check_preprocessor(source, field)
    options = own_options(source.options, row, f"{field}.options")
    return load_row(row, f"{field}.format")(options)
