"""From prompts to scored samples, packed for the ranks."""
