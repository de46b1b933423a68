"""The policy type "burnish" of LeRobot. It needs LeRobot; the package `lerobot_policy_burnish` alone imports it.

Names of modules, classes and functions are those by which LeRobot finds the parts of a plug-in.
"""
