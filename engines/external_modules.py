"""Modules of other people that register plugins when they are imported. No torch.

`infra.plugins` does the work; whatever looks plugins up imports the modules by itself. A job and
each rank of its group call this first, so that a module which changes something else on import
(a library's patch) does so before that library is used.
"""

from infra.plugins import import_external_modules

__all__ = ["import_external_modules"]
