"""Advantage estimators: one pure function each."""
