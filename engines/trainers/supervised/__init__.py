"""Training on given answers: SFT, preferences, reward models."""
