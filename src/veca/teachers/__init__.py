"""Teachers: frozen backbones of any family, patch size, width and normalisation behind one interface.

They take images as the student sees them, and give features on the student's grid.
"""

from veca.teachers.load import load_teacher, output_dim_for, start_patch_embed
from veca.teachers.protocol import Standardized, Targets, Teacher, TeacherError

__all__ = ["Standardized", "Targets", "Teacher", "TeacherError", "load_teacher", "output_dim_for", "start_patch_embed"]
