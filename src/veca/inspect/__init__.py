"""Inspecting a model: attention maps and profiles, features as colours, figures, core statistics."""

from veca.inspect.core_stats import CoreStory, measure_cores
from veca.inspect.figure_layout import write_figure
from veca.inspect.figures import (
    draw_budgets,
    draw_cores,
    draw_features,
    draw_layers,
    draw_paths,
    draw_similarity,
    draw_states,
)
from veca.inspect.maps import Inside, contributions, core_maps, core_profiles, look_inside
from veca.inspect.projections import heat, pca, project, to_rgb, umap
from veca.inspect.story_report import draw_story, story_table, write_story

__all__ = [
    "CoreStory", "Inside", "contributions", "core_maps", "core_profiles", "draw_budgets", "draw_cores",
    "draw_features", "draw_layers", "draw_paths", "draw_similarity", "draw_states", "draw_story", "heat",
    "look_inside", "measure_cores", "pca", "project", "story_table", "to_rgb", "umap", "write_figure",
    "write_story",
]  # fmt: skip
