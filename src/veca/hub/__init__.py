"""Models for other ecosystems: `veca.hub.timm`, `veca.hub.transformers`, and files by `veca.hub.export`.

Importing `veca.hub.timm` or `veca.hub.transformers` registers our models there; `import veca` imports neither library.
"""
