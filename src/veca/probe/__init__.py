"""What the features are worth: frozen backbone, small heads, public benchmarks."""
