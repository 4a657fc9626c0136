"""Old name of `engines.training.base`, for one release."""

import warnings

from engines.training.base import create_engine as create_engine

warnings.warn(
    "engines.training.create is now engines.training.base", DeprecationWarning, stacklevel=2
)
