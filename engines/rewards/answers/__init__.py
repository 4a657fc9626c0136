"""The final answer of a completion: where it stands, in what form it is compared."""
