"""Promises about the codec bench: what it measures is there for every codec, and adds up."""

import json

import pytest

from diloco.pipeline.payload.codec import TRAITS
from diloco_studies.bench import codec

ELEMENTS = 20_000


@pytest.mark.slow
def test_every_codec_is_measured_and_written(tmp_path, capsys) -> None:
    """Through a real Redis, on loopback and behind a link: fewer bytes, and more of the delta lost."""
    codec.main(f"{ELEMENTS}", 1.0, 1, tmp_path / "found.json", "cpu")
    (found,) = json.loads((tmp_path / "found.json").read_text())["sizes"]
    by_size = sorted(
        (-found[name]["bytes_per_element"]["median"], found[name]["relative_error"]["median"]) for name in TRAITS
    )
    lost = [error for _, error in by_size]
    assert lost == sorted(lost)
    assert by_size[0] == (-4, 0)
    for name in TRAITS:
        for figure in ("encode_gb_s", "device_gb_s", "decode_gb_s", "loopback_s", "link_s"):
            assert found[name][figure]["median"] > 0
    assert "int4" in capsys.readouterr().out
