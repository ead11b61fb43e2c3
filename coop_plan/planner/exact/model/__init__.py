"""The programs that are solved: their variables, constraints and cuts."""
