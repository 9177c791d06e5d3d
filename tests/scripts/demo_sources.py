"""A small stand-in for the three packages: the files' own layout, a handful of entries each."""

import json
from pathlib import Path
from typing import Any

from scripts.demo.sources import Sources

# code, folder, name, capital, currencies in the plural, region, population, neighbours
_WORLD = """
fr | europe | France | Paris | euros (EUR) | Western Europe | 66,553,766 | Belgium, Spain
sp | europe | Spain | Madrid | euros (EUR) | Southwestern Europe | 48,146,134 | France
be | europe | Belgium | Brussels | euros (EUR) | Western Europe | 11,323,973 | France
ke | africa | Kenya | Nairobi | Kenyan shillings (KES) | Eastern Africa | 45,925,301 | Uganda
ug | africa | Uganda | Kampala | Ugandan shillings (UGX) | Eastern Africa | 37,101,745 | Kenya
ja | asia | Japan | Tokyo | yen (JPY) | Eastern Asia | 126,919,659 |
bf | carib | The Bahamas | Nassau | Bahamian dollars (BSD) | Caribbean | 324,597 |
sz | europe | Switzerland | Bern | Swiss francs (CHF) | Central Europe | 8,121,830 | France
"""


def profile(name: str, capital: str, currencies: str, region: str, population: str, neighbours: str) -> dict[str, Any]:
    """One country profile with the fields that questions are made of."""

    def text(value: str) -> dict[str, str]:
        return {"text": value}

    return {
        "Introduction": {"Background": text(f"{name} has a long history. Its people are many.")},
        "Geography": {
            "Location": text(f"{region}, near the sea"),
            "Area": {"total": text("643,801 sq km; 551,500 sq km (mainland)")},
            "Climate": text("temperate; mild winters"),
            "Coastline": text("100 km"),
            "Natural resources": text("coal, iron ore, zinc"),
            "Land boundaries": {
                "border countries": text(neighbours and neighbours.replace(",", " 100 km,") + " 100 km")
            },
            "Elevation extremes": {"highest point": text("Mount High (Old Peak) 4,807 m")},
        },
        "People and Society": {
            "Population": text(f"{population} (July 2015 est.)"),
            "Languages": text("French (official) 88.8%, German 10% (official), other 1.2%"),
            "Nationality": {"noun": text(f"{name[:4]}ian(s)")},
        },
        "Government": {
            "Country name": {"conventional short form": text(name)},
            "Capital": {"name": text(capital)},
            "Government type": text("republic; since long"),
            "Independence": text("1 October 1960 (from the UK)"),
        },
        "Economy": {"Exchange rates": text(f"{currencies} per US dollar - ++ 0.75")},
        "Communications": {
            "Internet country code": text(".xx"),
            "Telephone system": {"international": text("country code - 33; cable")},
        },
    }


def write_sources(folder: Path) -> Sources:
    """Write the stand-in packages below `folder`."""
    factbook, wordnet, docs = folder / "factbook", folder / "wordnet", folder / "docs"
    for line in _WORLD.strip().splitlines():
        code, region, *fields = (field.strip() for field in line.split("|"))
        path = factbook / region / f"{code}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(profile(*fields)))
    (factbook / "package.json").write_text(
        json.dumps({"version": "1.0.0", "license": "Public Domain", "author": "Someone"})
    )
    wordnet.mkdir()
    _write_wordnet(wordnet)
    (docs / "tutorial").mkdir(parents=True)
    paragraph = "Use :func:`print` to show a value, as in ``print(1)``; see `the guide <guide.html>`_ for more.\n\n"
    (docs / "tutorial" / "intro.rst.txt").write_text("Title\n=====\n\n.. index:: value\n\n" + paragraph * 40)
    wordnet_licence, python_licence = folder / "wordnet_copyright", folder / "python_copyright"
    wordnet_licence.write_text(
        "Files: *\nLicense: WordNet3.0\n Use it freely.\n .\n Keep this notice.\n\nFiles: debian/*\n"
    )
    python_licence.write_text(
        "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2\n----\n\n1. You may use Python.\n\nBEOPEN.COM\n"
    )
    return Sources(
        factbook=factbook,
        wordnet=wordnet,
        python_docs=docs,
        wordnet_licence=wordnet_licence,
        python_licence=python_licence,
    )


def _write_wordnet(folder: Path) -> None:
    words = [f"word{'abcdefghijklmnopqrstuvwxyz'[index % 26]}{'abc'[index // 26]}" for index in range(60)]
    data, index, counts = "", "", ""
    for number, word in enumerate(words):
        index += f"{word} n 1 0 1 1 {len(data):08d}\n"
        data += f'{len(data):08d} 03 n 01 {word} 0 000 | meaning number {number} of them all; "an example"\n'
        counts += f"{word}%1:03:00:: 1 {len(words) - number}\n"
    for part in ("noun", "verb", "adj", "adv"):
        (folder / f"data.{part}").write_text(data if part == "noun" else "")
        (folder / f"index.{part}").write_text(index if part == "noun" else "  1 a licence line\n")
    (folder / "cntlist.rev").write_text(counts)
