"""Entry point of the command `coop-plan` and of `python -m coop_plan`."""

import sys


def main() -> None:
    """Run the command; an incomplete installation ends it with one line."""
    from coop_plan import incomplete

    if reason := incomplete():
        sys.exit(f"coop-plan: error: {reason}")
    from coop_plan.api.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
