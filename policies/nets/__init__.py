"""Network bodies and encoders."""
