"""Learns from interaction, starting from a policy."""

if not __name__.startswith("burnish."):
    raise ImportError(
        "this folder is the package burnish.finetune: write `import burnish.finetune` "
        "(run `make dev` first, and start Python outside the folder)"
    )
