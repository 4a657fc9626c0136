"""Data: readers, row schema, chat rendering, packing, visiting order, and generated problems."""
