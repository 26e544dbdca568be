from pathlib import Path

from tritone.progress import LoadProgress, loaded_bytes


def test_stages_add_up(tmp_path: Path) -> None:
    assert loaded_bytes(tmp_path) == (0, 0)
    prefill, decode = LoadProgress(tmp_path, "prefill"), LoadProgress(tmp_path, "decode")
    prefill(10, 100)
    decode(100, 100)
    assert loaded_bytes(tmp_path) == (110, 200)


def test_frequent_calls_write_seldom_but_the_last_always(tmp_path: Path) -> None:
    progress = LoadProgress(tmp_path, "prefill")
    for done in range(1, 100):
        progress(done, 100)
    assert loaded_bytes(tmp_path) == (1, 100)
    progress(100, 100)
    assert loaded_bytes(tmp_path) == (100, 100)
