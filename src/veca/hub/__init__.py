"""VECA where others look for models: `veca.hub.timm`, `veca.hub.transformers`; for other runtimes, `veca.hub.export`.

Importing `veca.hub.timm` or `veca.hub.transformers` registers the models there. `import veca` imports neither library.
"""
