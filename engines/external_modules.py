"""Modules of other people that register plugins when they are imported. No torch.

`infra.plugins` does the work; whatever looks plugins up imports the modules by itself. A job and
each rank of its group call this first, so that a module which changes something else on import
(a library's patch) does so before that library is used.
"""

import logging

from infra import plugins

logger = logging.getLogger(__name__)


def import_external_modules() -> None:
    """Import what RLHF_USE_EXTERNAL_MODULES names; one that cannot be imported is a warning."""
    for broken in plugins.import_external_modules():
        logger.warning("%s", broken)
