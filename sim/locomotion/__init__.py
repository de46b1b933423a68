"""Gymnasium's running robots as tasks of ours: `settings.py` and `robots.py`."""
