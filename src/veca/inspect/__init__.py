"""Looking inside a model: where its cores look, what they contribute, its features as colours, figures and numbers."""

from veca.inspect.contribution import Inside, contributions, core_profiles, look_inside
from veca.inspect.core_figures import draw_cores, draw_layers, draw_paths, draw_states
from veca.inspect.feature_figures import draw_budgets, draw_features, draw_similarity
from veca.inspect.maps import core_maps
from veca.inspect.projections import heat, pca, project, to_rgb, umap
from veca.inspect.sheet import write_figure
from veca.inspect.story import CoreStory, measure_cores
from veca.inspect.story_report import draw_story, story_table, write_story

__all__ = [
    "CoreStory",
    "Inside",
    "contributions",
    "core_maps",
    "core_profiles",
    "draw_budgets",
    "draw_cores",
    "draw_features",
    "draw_layers",
    "draw_paths",
    "draw_similarity",
    "draw_states",
    "draw_story",
    "heat",
    "look_inside",
    "measure_cores",
    "pca",
    "project",
    "story_table",
    "to_rgb",
    "umap",
    "write_figure",
    "write_story",
]
