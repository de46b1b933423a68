"""Worlds that other packages own, played by ours: in this process, in workers, on a GPU."""
