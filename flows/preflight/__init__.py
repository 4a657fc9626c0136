"""Checks before a run: storage, platform, models, data and rewards."""

from flows.preflight.resolve import preflight as preflight
