"""Models that a stage serves without training them: engines, answers, judges."""
