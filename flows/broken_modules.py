"""Tells at a terminal which modules of RLHF_USE_EXTERNAL_MODULES cannot be imported.

Promises: one line each on stderr; what was asked for goes on without them, and stops by itself
where it needs what one of them would have registered.
"""

import sys

from infra.plugins import import_external_modules


def tell_broken_modules() -> None:
    """Write one line for each to stderr."""
    for broken in import_external_modules():
        sys.stderr.write(f"{broken}\n")
