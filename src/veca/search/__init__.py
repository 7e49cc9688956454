"""Search by image: an index of the features of images, asked for those like an image or a region of one."""

from veca.search.build import IndexReport, update_index
from veca.search.index import DuplicateGroup, Match, SearchIndex
from veca.search.store import SearchError

__all__ = ["DuplicateGroup", "IndexReport", "Match", "SearchError", "SearchIndex", "update_index"]
