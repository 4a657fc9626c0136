"""Reports modules of RLHF_USE_EXTERNAL_MODULES that cannot be imported.

The command goes on without them; it fails later if it needs a plugin that one would register.
"""

import sys

from infra.plugins import import_external_modules


def tell_broken_modules() -> None:
    """Write one line to stderr for each module that cannot be imported."""
    for broken in import_external_modules():
        sys.stderr.write(f"{broken}\n")
