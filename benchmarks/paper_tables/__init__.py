"""The papers' tables and figures: what was published, beside what runs of ours give."""
