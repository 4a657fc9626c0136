"""Rows as training needs them: read, rendered, tokenized, packed."""
