"""`burnish compare` and its report."""
