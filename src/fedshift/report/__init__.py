"""Run folders → tables (terminal, Markdown, LaTeX, JSON), plots and one HTML page. Pure functions of the files."""
