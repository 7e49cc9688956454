"""Distilling a VECA from a frozen teacher."""
