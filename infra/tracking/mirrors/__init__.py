"""Trackers without a server, which are told the same as the first, and whoever tells them."""
