"""Evaluation of frozen backbones on public benchmarks: linear and k-NN classification, segmentation, depth."""
