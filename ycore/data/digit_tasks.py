"""Questions about pictures of handwritten digits, with the digits themselves in the rows."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

from ycore.models.sighted import read_digits
from ycore.run.images import png_of

QUESTIONS = {
    "see-digit": "Which digit is <image>? Answer with just the number.",
    "see-and-add": "What is <image> + <image>? Answer with just the number.",
}
"""By the task's name. The answer is the sum of the digits that are shown."""


def digit_rows(
    name: str, arguments: Mapping[str, int], split: str, chance: random.Random
) -> Iterator[dict[str, Any]]:
    """Rows without end: `prompt`, `images` as files, `answer`. With `wrong` the pictures are others than are asked
    about, drawn at random: what a model then gets right it did not see."""
    from PIL import Image

    pictures, digits = read_digits(split)
    question = QUESTIONS[name]
    count = question.count("<image>")
    while True:
        asked = [chance.randrange(len(digits)) for _ in range(count)]
        shown = (
            [chance.randrange(len(digits)) for _ in range(count)] if arguments["wrong"] else asked
        )
        files = [png_of(Image.fromarray(pictures[number])) for number in shown]
        yield {
            "prompt": question,
            "images": files,
            "answer": str(sum(int(digits[number]) for number in asked)),
        }
