"""Primal side: from solutions of the models to placed schedules."""
