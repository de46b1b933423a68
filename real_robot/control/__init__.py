"""The control loop, its process, its link to policies, and its watchdog."""
