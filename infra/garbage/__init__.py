"""What nobody needs any more of a store: found, shown, and taken away."""
