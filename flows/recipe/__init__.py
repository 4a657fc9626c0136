"""The recipe: loaded, overlaid, validated."""
