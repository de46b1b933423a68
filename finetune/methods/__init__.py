"""Methods of refinement, one file each."""
