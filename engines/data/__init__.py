"""Data: readers, row schema, chat rendering, packing, order, and the generator of tasks."""
