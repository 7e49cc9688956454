"""HTML pages and charts shared by all reports."""
