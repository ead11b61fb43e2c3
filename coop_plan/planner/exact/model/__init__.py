"""Mixed-integer programs: variables, constraints and cuts."""
