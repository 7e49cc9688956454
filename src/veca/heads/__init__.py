"""Linear and dense heads on frozen backbones: features, training, losses and metrics."""
