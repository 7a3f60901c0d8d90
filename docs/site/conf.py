"""Sphinx's settings. ``make docs`` first lets assemble.py lay out the pages, then builds them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from gallery import around_script, draw_results

import fedshift

project = "fedshift"
author = "The fedshift developers"
release = fedshift.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_gallery.gen_gallery"]
exclude_patterns = ["examples", "gallery/*.md5"]
suppress_warnings = ["config.cache"]  # the gallery's functions cannot be pickled, so pages are read anew each time

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_class_signature = "separated"
toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
html_context = {"default_mode": "auto"}  # without it the theme complains in the console
html_title = "fedshift"
html_theme_options = {
    "navigation_with_keys": False,
    "show_prev_next": False,
    "show_toc_level": 2,
    "header_links_before_dropdown": 6,
}
html_static_path = ["style.css"]
html_css_files = ["style.css"]
html_show_sourcelink = False

sphinx_gallery_conf = {
    "examples_dirs": ["examples/python"],
    "gallery_dirs": ["gallery"],
    # The others need a data set, or start processes; their code is shown without its output.
    "filename_pattern": r"/your_|/reading_|/time_",
    "thumbnail_size": (480, 288),
    "default_thumb_file": str(Path(__file__).parent / "code.svg"),
    "within_subsection_order": "gallery.example_order",
    "image_scrapers": [draw_results],
    "reset_modules": (around_script,),
    "reset_modules_order": "both",
    "capture_repr": (),
    "abort_on_example_error": True,
    "show_memory": False,
    "download_all_examples": False,
}
