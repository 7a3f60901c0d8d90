"""The protocols, one file each: which sites a run has, what part each plays, which rows train and are measured."""
