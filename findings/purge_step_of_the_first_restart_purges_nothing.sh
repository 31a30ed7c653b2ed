#!/usr/bin/env bash
# torch's SummaryWriter(purge_step=5) promises that points of step 5 and later, written before a crash, are hidden from
# TensorBoard. TensorBoard's Python reader (--load_fast=false, and every tool built on its plugin accumulator) takes the
# first restart mark of a folder for the start of the run: after the first restart the old points stay, beside the new
# ones, and the curve goes back and forth. Only from the second restart on does purge_step work. TensorBoard's older
# accumulator, which scripts use, purges at the first mark.
# Guess before the run: both readers show steps 0 to 6, each once.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
env/bin/pip install --quiet --disable-pip-version-check tensorboard==2.21.0 'setuptools<81'
cat > run.py <<'PY'
import logging
from importlib.metadata import version

from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator
from torch.utils.tensorboard import SummaryWriter

logging.disable(logging.WARNING)


def attempt(first, last, value, **options):
    writer = SummaryWriter("log", **options)
    for step in range(first, last):
        writer.add_scalar("loss", value, step)
    writer.close()


def seen():
    old = event_accumulator.EventAccumulator("log").Reload()
    new = plugin_event_accumulator.EventAccumulator("log").Reload()
    return [one.step for one in old.Scalars("loss")], [one.step for one in new.Tensors("loss")]


attempt(0, 8, 1.0)
attempt(5, 7, 2.0, purge_step=5)
scripts, server = seen()
print("torch", version("torch"), "tensorboard", version("tensorboard"))
print("after the first restart: older accumulator", scripts, "- reader of the server", server)
assert scripts == [0, 1, 2, 3, 4, 5, 6], scripts
assert server == [0, 1, 2, 3, 4, 5, 6, 7, 5, 6], server
attempt(3, 5, 3.0, purge_step=3)
scripts, server = seen()
print("after the second restart: older accumulator", scripts, "- reader of the server", server)
assert scripts == server == [0, 1, 2, 3, 4], server
PY
env/bin/python -W ignore run.py 2>&1 | grep -v "^TensorFlow"
echo "as found: the first purge_step of a folder purges nothing in TensorBoard's Python reader, the second does"
