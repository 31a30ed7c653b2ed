"""Entry point of the command `engine`, of ``python -m engine`` and of ``torchrun -m engine``."""

from engine.preflight.package import exit_unless_ours


def main() -> None:
    exit_unless_ours()
    from engine.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
