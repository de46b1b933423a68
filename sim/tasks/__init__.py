"""The manipulation tasks of our own, one per file; `sim/build.py` lists them."""
