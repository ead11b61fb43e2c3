"""The doors for people and programs: the CLI, the REST service, the plan store."""
