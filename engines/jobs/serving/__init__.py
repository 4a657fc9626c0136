"""Models that a stage serves and does not train: their engines, their answers, their judges."""
