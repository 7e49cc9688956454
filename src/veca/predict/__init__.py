"""Predictions of fine-tuned models: `veca.load_finetuned` in Python, files of many images by `veca predict`."""

from veca.predict.predictor import ClassPrediction, DepthPrediction, MaskPrediction, Predictor, load_finetuned

__all__ = ["ClassPrediction", "DepthPrediction", "MaskPrediction", "Predictor", "load_finetuned"]
