"""Rows as training needs them: read, rendered, tokenized, ordered, packed."""
