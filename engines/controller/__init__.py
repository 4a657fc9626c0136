"""The worker groups through which a trainer reaches its ranks."""
