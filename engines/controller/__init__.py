"""Worker groups through which a trainer reaches its ranks."""
