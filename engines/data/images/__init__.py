"""Encoded images of rows: checked, stored and read by their digest. Imports no torch."""
