"""Algorithms of other libraries, on our worlds and views, ending in policies of ours."""
