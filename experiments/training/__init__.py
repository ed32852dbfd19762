"""Training as pure functions of one state: schedules, the optimizer, the step, checkpoints."""
