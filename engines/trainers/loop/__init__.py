"""What every training loop has: its steps, their clock, and how it goes on after a kill."""
