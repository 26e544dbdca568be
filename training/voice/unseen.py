"""What the voice is judged by, and never trained on: fifty sentences of 3 to 40 words, and rows of figures."""

from __future__ import annotations

import random

SENTENCES = (
    "Dinner is ready.",
    "I love rainy mornings.",
    "Where are my keys?",
    "Please close the window.",
    "The museum opens at ten.",
    "She plays the violin beautifully.",
    "Our neighbors have two dogs.",
    "Let us walk along the river.",
    "He forgot to water the plants.",
    "The soup needs a little more salt.",
    "My grandmother tells the best stories.",
    "Can we meet after lunch on Friday?",
    "The bridge was built a hundred years ago.",
    "Paris is the capital of France.",
    "A gentle wind moved across the open field.",
    "The bus stops right in front of the school.",
    "You should drink more water when it is hot.",
    "They painted the old fence green last summer.",
    "The teacher asked the students to open their books.",
    "I usually read for half an hour before going to sleep.",
    "The baker sells fresh bread every morning except on Sunday.",
    "Honey bees collect nectar from flowers and turn it into honey.",
    "If you are lost, ask a police officer for the way.",
    "The moon goes around the earth about once in a month.",
    "We planted tomatoes and beans in the garden behind the house.",
    "Music can make us happy, calm us down, or help us remember.",
    "The farmer got up early to feed the horses and the chickens.",
    "After the storm had passed, the children ran outside to play.",
    "A good friend listens to you even when there is nothing to say.",
    "The train to the airport leaves every twenty minutes from platform two.",
    "Leaves change color in autumn because the days grow shorter and cooler.",
    "She opened the letter with shaking hands and began to read it slowly.",
    "Cats sleep for many hours a day, but they hunt mostly at night.",
    "The doctor told him to eat more vegetables and to take a walk every day.",
    "Most birds fly south before winter comes, and return when the weather gets warm again.",
    "To make tea, boil some water, pour it over the leaves, and wait for three minutes.",
    "The sky looks blue because the air scatters blue light more than it scatters red light.",
    "He has worked in the same factory for thirty years, and he knows every machine by its sound.",
    "When the lights went out, everyone stayed calm, and somebody found a candle in the kitchen drawer.",
    "The small shop on the corner sells newspapers, milk, and the best chocolate cake in the whole town.",
    "A bicycle is cheap, quiet, and healthy, which is why so many people in this city ride one to work.",
    "I would like to thank all of you for coming tonight, and I hope that you will enjoy the concert.",
    "The ocean covers most of our planet, and we have seen only a very small part of what lives in it.",
    "Before you paint a wall, you should clean it, fill the holes, and cover the floor, or you will regret it later.",
    "My brother wanted to become a pilot when he was a child, but now he writes books about animals and lives near a forest.",
    "Sleep is important because it gives the body time to repair itself, and it helps the brain to store what we learned "
    "during the day.",
    "The old man sat on a bench in the park, fed the ducks with dry bread, and told anyone who would listen about the years "
    "he had spent at sea.",
    "Learning a new language takes time and patience, but if you practice a little every day, you will soon be able to "
    "understand songs, read simple books, and talk with people.",
    "Although the road was long and the night was cold, the travelers kept walking toward the lights of the village, because "
    "they knew that a warm fire and a good meal were waiting for them.",
    "When spring comes to the mountains, the snow melts slowly, the rivers grow wide and fast, the meadows fill with yellow "
    "flowers, and the shepherds bring their sheep back up to the high green pastures once again.",
)

_FIGURES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def digit_rows(seed: int, count: int = 20) -> tuple[str, ...]:
    """Rows of five spoken figures."""
    draw = random.Random(seed)
    return tuple(" ".join(draw.choice(_FIGURES) for _ in range(5)) for _ in range(count))


DIGITS = digit_rows(1) + digit_rows(2)

UNSEEN = frozenset(text.lower() for text in SENTENCES + DIGITS)
"""In lower case, as `answers` leaves them out."""
