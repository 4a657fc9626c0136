"""Serverless trackers that receive the same data as the main one, and the fan-out to them."""
