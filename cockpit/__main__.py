"""The command `cockpit` and ``python -m cockpit``."""

from engine.namesake import end_if_not_ours


def main() -> None:
    end_if_not_ours()
    from cockpit.cli import main as run

    run()


if __name__ == "__main__":
    main()
