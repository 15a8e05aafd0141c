"""DFlash (arXiv 2602.06036): one forward fills in a block of masks; here a tree grows from it."""
