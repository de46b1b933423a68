"""People who intervene: recordings of interventions, DAgger, RLIF, teachers."""
