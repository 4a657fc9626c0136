"""Weight sync: trained weights reach the rollout engine verified, or nothing is sampled."""
