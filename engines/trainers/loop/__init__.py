"""Parts of every training loop: steps, clock, progress and resume."""
