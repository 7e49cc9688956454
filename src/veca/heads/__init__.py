"""Linear and dense heads over features, their losses and their metrics."""
