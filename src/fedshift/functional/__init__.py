"""Equations as pure functions, one each: no state, no data, no network of fedshift's own."""
