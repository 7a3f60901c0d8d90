"""The parts of the page: each makes what its template shows."""
