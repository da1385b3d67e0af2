"""Schedules, plans and simulated numbers of small cases, byte for byte."""

from support.goldens import FOLDER, golden_files


def test_goldens_are_what_the_code_makes_now() -> None:
    made = dict(golden_files())
    kept = {path.name: path.read_text(encoding="ascii") for path in FOLDER.iterdir()}
    assert kept.keys() == made.keys()
    for name, text in made.items():
        assert text == kept[name], f"{name} changed; scripts/regenerate_goldens writes it again"
