"""One optimizer step: micro-batches, balance, totals, what is measured."""
