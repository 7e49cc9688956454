"""Benchmarks of models, attention, training steps, data loading, embedding, ONNX files and the servers.

`veca bench model|train|attention` runs every entry of `contenders` on the cases of a sweep (`run`), with the machine's
own limits (`machine`) and the error against float64 beside each time; `report` shows results.
"""
