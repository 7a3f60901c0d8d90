"""The methods: one file each, read like its paper. `registry` finds them by name."""
