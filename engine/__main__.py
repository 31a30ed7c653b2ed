"""Entry point of the command `engine`, of ``python -m engine`` and of ``torchrun -m engine``.

All imports are in `main`, so that Ctrl-C while modules are loading also ends the command without a traceback.
"""

INTERRUPTED = 130  # exit status: 128 + SIGINT


def main() -> None:
    try:
        from engine.preflight.interrupts import one_interrupt
        from engine.preflight.package import exit_unless_ours

        with one_interrupt():
            exit_unless_ours()
            from engine.cli.main import main as run

            run()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    main()
