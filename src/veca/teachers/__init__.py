"""Teachers: frozen backbones behind one small protocol, whatever their family, patch size, width or normalisation.

Pictures come as the student sees them; what comes back lies on the student's grid.
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
