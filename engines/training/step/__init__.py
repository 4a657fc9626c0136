"""Parts of one optimizer step: micro-batches, balance, totals, metrics."""
