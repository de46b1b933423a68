"""Guard, monitors, fallback and the robot that has them all."""
