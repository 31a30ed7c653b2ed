"""Errors of `engine` before a run starts: a one-sentence message and the exit status."""

from pathlib import Path

import pytest

from engine.cli.main import main
from tests.unit.engine.config.test_layout import DEMO

FULL = Path("/dev/full")
NEEDS = "engine run needs a layout as first argument, a TOML file such as layouts/demo.toml (see engine run --help)\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            [],
            "engine needs a command; legal: run, plan, simulate, tokenize, sample, probe, collectives, import-hf, "
            "export-hf, layouts, reference, completion (see engine --help)\n",
        ),
        (["run"], NEEDS),
        (["run", "train.steps=3"], NEEDS),
        (["run", "--json", "train.steps=3"], NEEDS),
        (["run", "absent.toml"], "cannot read the layout absent.toml: No such file or directory\n"),
        (["run", str(DEMO), "--device", "tpu"], "(choose from 'auto', 'cpu', 'cuda')\n"),
        (
            ["run", str(DEMO), "model.activation=gelu"],
            "model.activation = gelu: an MLP without gate can be planned and simulated, but not trained yet; legal for "
            "engine run: swiglu\n",
        ),
        (
            ["sample", "grid.tp=2"],
            "engine sample needs a checkpoint or the folder of a run as first argument\n",
        ),
        (
            ["sample", "absent", "--prompt", "a"],
            "there is no complete checkpoint in absent; legal: a checkpoint, or the folder of a run with one\n",
        ),
        (
            ["sample", "absent"],
            "engine sample needs one of --prompt TEXT and --prompt-ids ID,ID,...\n",
        ),
        (
            ["sample", "absent", "--prompt", "a", "--top-p", "2"],
            "--top-p = 2.0 is not legal; legal: above 0, at most 1\n",
        ),
        (
            ["sample", "absent", "--prompt", "a", "--temperature", "nan"],
            "--temperature = nan is not legal; legal: from 0 to 1000\n",
        ),
        (["layouts", "absent"], "there is no folder of layouts absent; legal: a folder with TOML files\n"),
        (["layouts", "--wrong"], "engine layouts has no option --wrong; see engine layouts --help\n"),
        (["run", str(DEMO), "--wrong"], "engine run has no option --wrong; see engine run --help\n"),
    ],
)
def test_an_invalid_command_line_gets_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "") and err.endswith(sentence) and err.count("\n") == 1


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("words", [["plan", str(DEMO), "--json"], ["layouts"], ["reference"]])
def test_a_full_disk_gets_one_sentence(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with FULL.open("w") as full, pytest.raises(SystemExit) as end:
        monkeypatch.setattr("sys.stdout", full)
        main(words)
    assert end.value.code == 1
    assert capsys.readouterr().err == "standard output cannot be written: No space left on device\n"
