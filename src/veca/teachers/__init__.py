"""Teachers: frozen backbones of any family, patch size, width and normalisation behind one interface.

They take images as the student sees them, and give features on the student's grid.
"""

from veca.teachers.from_timm import TimmTeacher, timm_teacher
from veca.teachers.from_transformers import HfTeacher, RadioTeacher, hf_teacher
from veca.teachers.load import load_teacher, output_dim_for, start_patch_embed
from veca.teachers.protocol import Meet, Standardized, Targets, Teacher, TeacherError

__all__ = [
    "HfTeacher",
    "Meet",
    "RadioTeacher",
    "Standardized",
    "Targets",
    "Teacher",
    "TeacherError",
    "TimmTeacher",
    "hf_teacher",
    "load_teacher",
    "output_dim_for",
    "start_patch_embed",
    "timm_teacher",
]
