"""What all unit tests share: property tests have no deadline per example, for machines get busy."""

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
