"""The command `cockpit` and ``python -m cockpit``."""

from engine.preflight.package import end_if_not_ours


def main() -> None:
    end_if_not_ours()
    from cockpit.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
