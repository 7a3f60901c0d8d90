"""One pure function per equation: no state, no data, no model of fedshift's own."""
