"""Generated text on a terminal: control characters are escaped, and characters that consist of several tokens are
printed whole."""

from engine.data.tokenizers import Bytes
from engine.sampling.text import TextStream, escaped


def test_control_characters_are_escaped() -> None:
    assert escaped("a\x1b[2J\u202eb\r\x00\n\tä") == "a\\x1b[2J\\u202eb\\r\\x00\n\tä"


def test_characters_of_several_tokens_arrive_whole() -> None:
    stream = TextStream(Bytes())
    parts = [stream.add(token) for token in "aé€\x1b".encode() + b"\xff"]
    assert parts == ["a", "", "é", "", "", "€", "\\x1b", "\\xff"]
    assert stream.add(0xC3) == "" and stream.end() == "\\xc3"
    assert TextStream(Bytes()).add(300) == "<300>"
