"""Promises about the codec bench: what it measures is there for every codec, and adds up."""

import json

import pytest

from diloco_studies.bench import codec

ELEMENTS = 20_000


@pytest.mark.slow
def test_every_codec_is_measured_and_written(tmp_path, capsys) -> None:
    """Through a real Redis, on loopback and behind a link: fewer bytes, and more of the delta lost."""
    codec.main(f"{ELEMENTS}", 1.0, 1, tmp_path / "found.json", "cpu")
    (found,) = json.loads((tmp_path / "found.json").read_text())["sizes"]
    bytes_each = [found[name]["bytes_per_element"]["median"] for name in codec.CODECS]
    lost = [found[name]["relative_error"]["median"] for name in codec.CODECS]
    assert bytes_each == sorted(bytes_each, reverse=True)
    assert bytes_each[:2] == [4, 2]
    assert lost == sorted(lost)
    assert lost[0] == 0
    for name in codec.CODECS:
        for figure in ("encode_gb_s", "device_gb_s", "decode_gb_s", "loopback_s", "link_s"):
            assert found[name][figure]["median"] > 0
    assert "int4" in capsys.readouterr().out
