"""The `--device` option of the commands that take measurements."""

import argparse


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="default auto: one GPU per rank if the machine has enough, else the CPU",
    )
