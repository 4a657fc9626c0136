"""Old name of `engines.config.rules.batches`, for one release."""

import warnings

from engines.config.rules.batches import check_divides as check_divides

warnings.warn(
    "engines.config.rules.sizes is now engines.config.rules.batches",
    DeprecationWarning,
    stacklevel=2,
)
