"""Measuring a frozen backbone: nearest neighbours, and linear heads for classification, segmentation and depth."""
