"""One file per data set; `fedshift.data.registry` maps names to them."""
