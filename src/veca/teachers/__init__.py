"""Teachers: frozen backbones of any family, patch size, width and normalisation behind one interface.

They take images as the student sees them, and give features on the student's grid.
"""

from veca.teachers.inherit import inherit_weights, start_patch_embed
from veca.teachers.load import load_teacher
from veca.teachers.outputs import keep_output, output_dim_for, replace_output
from veca.teachers.protocol import AnyTeacher, Standardized, Targets, Teacher, TeacherError, TeacherGroup, members

__all__ = [
    "AnyTeacher",
    "Standardized",
    "Targets",
    "Teacher",
    "TeacherError",
    "TeacherGroup",
    "inherit_weights",
    "keep_output",
    "load_teacher",
    "members",
    "output_dim_for",
    "replace_output",
    "start_patch_embed",
]
