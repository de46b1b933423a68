"""The command line and `burnish doctor`."""
