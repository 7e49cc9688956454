"""Looking inside a model: where its cores look, and its features as colours."""

from veca.inspect.maps import core_maps
from veca.inspect.projections import heat, pca, to_rgb

__all__ = ["core_maps", "heat", "pca", "to_rgb"]
