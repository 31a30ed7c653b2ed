"""The command `engine`, ``python -m engine`` and ``torchrun -m engine``."""

from engine.preflight.package import end_if_not_ours


def main() -> None:
    end_if_not_ours()
    from engine.cli import main as run

    run()


if __name__ == "__main__":
    main()
