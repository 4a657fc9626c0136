"""What a night measures, how it is judged, and how it is shown."""
