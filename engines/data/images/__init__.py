"""Encoded images of rows: checked, stored by their content, read by it. Imports no torch."""
