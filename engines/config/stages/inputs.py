"""Old name of `engines.config.stages.base`, for one release."""

import warnings

from engines.config.stages.base import ExternalInput as ExternalInput
from engines.config.stages.base import model_input as model_input

warnings.warn(
    "engines.config.stages.inputs is now engines.config.stages.base",
    DeprecationWarning,
    stacklevel=2,
)
