"""Several policies into one, or a refined one with its base into one piece: `burnish distill`."""
