"""Old name of `engines.rollout.base`, for one release."""

import warnings

from engines.rollout.base import create_rollout_engine as create_rollout_engine

warnings.warn(
    "engines.rollout.create is now engines.rollout.base", DeprecationWarning, stacklevel=2
)
