"""A Universal Robots controller made of code, for the unmodified ur-rtde: stateful, strict, and spoiled on purpose."""
