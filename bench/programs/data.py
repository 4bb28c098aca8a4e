"""Data of the kind the programs read, made up: the time they take is real, what they learn is not."""

import random
import struct
from pathlib import Path


def mnist(folder: Path, sources: Path) -> None:
    """Digits as bright bars, in the format of MNIST, where the program looks for them: beside its folder."""
    raw = folder.parent / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    for name, count in (("train", 6400), ("t10k", 2000)):
        labels = bytes(chance.randrange(10) for _ in range(count))
        images = b"".join(_bar(label, chance) for label in labels)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 0x803, count, 28, 28) + images)
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, count) + labels)


def _bar(label: int, chance: random.Random) -> bytes:
    noise = bytearray(value % 60 for value in chance.randbytes(28 * 28))
    for at in range(2 * label * 28, (2 * label + 4) * 28):
        noise[at] += 150
    return bytes(noise)


def words(folder: Path, sources: Path) -> None:
    """A text of made-up words, as the two files of numbers that nanoGPT reads, and what it reads of itself from the
    working folder."""
    link = folder / "configurator.py"
    if not link.exists():
        link.symlink_to(sources / "nanoGPT" / "configurator.py")
    place = folder / "data" / "words"
    place.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    known = [[chance.randrange(1, 27) for _ in range(chance.randrange(2, 9))] for _ in range(500)]
    for name, count in (("train", 40_000), ("val", 4_000)):
        letters = [letter for _ in range(count) for letter in [*chance.choice(known), 0]]
        (place / f"{name}.bin").write_bytes(struct.pack(f"<{len(letters)}H", *letters))


def images(folder: Path, sources: Path) -> None:
    """Pictures of noise in two classes: to train a GAN on, and to train and validate a classifier with."""
    chance = random.Random(0)
    for part, count in (("images", 480), ("imagenet/train", 160), ("imagenet/val", 48)):
        for number in range(count):
            file = folder / part / f"class{number % 2}" / f"{number}.ppm"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"P6 64 64 255\n" + chance.randbytes(64 * 64 * 3))
