"""The command `cockpit` and ``python -m cockpit``."""

from engine.preflight.package import exit_unless_ours


def main() -> None:
    exit_unless_ours()
    from cockpit.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
