"""ROS-free hardware: adapter, guard, control loop, drivers."""

if not __name__.startswith("burnish."):
    raise ImportError(
        "this folder is the package burnish.real_robot: write `import burnish.real_robot` "
        "(run `make dev` first, and start Python outside the folder)"
    )
