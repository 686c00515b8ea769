"""Chat prompts by templates times topics: for each topic four of a kind that quotes its text, three of any other."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from distill.corpora.corpus import Document, split_place

TEMPLATES: dict[str, tuple[str, ...]] = {
    "explain": (
        "Explain why {why}.",
        "Why is it that {why}? Explain it to a child of ten.",
        "In three short paragraphs, explain why {why}.",
        "A friend doubts that {why}. What would you tell them?",
        "What should everyone know about {topic}? Give five points and a reason for each.",
        "Explain how to {how}, step by step.",
        "What are the most common mistakes of people who want to {how}?",
    ),
    "write": (
        "Write a short story in which {topic} play a part. It should have a surprising end.",
        "Write an email to a neighbour in which you ask for help, because you want to {how}.",
        "Write a speech of one minute about {topic} for a school class.",
        "Write a poem of three verses about {topic}.",
        "Write an advertisement for a weekend course on how to {how}.",
        "Write a dialogue between two friends, one of whom wants to {how} while the other thinks it is a bad idea.",
        "Plan a blog post on {topic}: a title, five headings, and two sentences for each.",
    ),
    "code": (
        "Write a Python function that {code}.",
        "Write a Python function that {code}. Add a docstring and type hints.",
        "Write a Python function that {code}, and three tests for it with pytest.",
        "Write a JavaScript function that {code}.",
        "Write a small command-line program in Python that {code}.",
        "I need a Python function that {code}. What should it do with empty or wrong input? Write it so.",
    ),
    "arithmetic": (
        "One {item} costs {price} dollars. {name} buys {count} and pays with 400 dollars. How much change is there?",
        "A shop has {stock} of one kind of {item} and sells {count} a day. How many are left after {days} days?",
        "At {price} dollars for one {item}, {name} sells {count} on Saturday and twice as many on Sunday. How much "
        "money is that in all?",
        "One {item} costs {price} dollars. A group of {count} people buys {days} and shares the cost. What does each "
        "of them pay?",
        "Last year one {item} cost {price} dollars, and now it costs {percent} percent more. What do {days} cost now?",
        "How many can {name} buy with {stock} dollars, if one {item} costs {price} dollars, and how much is left?",
    ),
    "summarise": (
        "Summarise the following text in two sentences.\n\n{text}",
        "{text}\n\nSummarise this in one sentence.",
        "Read the text below and list its most important facts as bullet points.\n\n{text}",
        "What is the main point of this text? Quote the sentence that shows it best.\n\n{text}",
        "Give this text a title, and then a summary of at most 40 words.\n\n{text}",
        "Make a table of two columns from this text: what is told, and the number that goes with it.\n\n{text}",
    ),
    "rewrite": (
        "Rewrite this text for a child, and keep all of its facts.\n\n{text}",
        "Correct any mistakes in this text and give it back whole.\n\n{mistaken}",
        "Put each sentence of this text on a line of its own, numbered, with its words unchanged.\n\n{text}",
        "Rewrite the following text in the past tense. Change nothing else.\n\n{text}",
        "{text}\n\nRewrite the text above so that it sounds more formal.",
        "Replace every number in this text by X and give back the whole text.\n\n{text}",
        "Repeat the text below, with its last sentence first.\n\n{text}",
    ),
    "extract": (
        "List every number in this text together with what it counts.\n\n{text}",
        "Give back the facts of this text as JSON with the keys topic, numbers, places and people.\n\n{text}",
        "Copy all sentences of this text that hold a number.\n\n{text}",
        "{text}\n\nWhich names of people and places stand in this text? Quote the sentence of each.",
        "Copy the first and the last sentence of this text.\n\n{text}",
        "Extract all times, dates and lengths of time from this text, one on each line.\n\n{text}",
    ),
    "answer": (
        "{text}\n\nAnswer from this text: {question}",
        "Text:\n{text}\n\nQuestion: {question}\nQuote the sentence that holds the answer.",
        "Use the text to answer the question in a full sentence.\n\n{text}\n\n{question}",
        "{question} Here is what I read:\n\n{text}",
    ),
}
"""Kind of chat -> ways to ask; braces hold what a topic or a draw fills in."""
KINDS = tuple(TEMPLATES)
QUOTING = ("summarise", "rewrite", "extract", "answer")
"""Kinds whose prompts give a text, of which answers quote."""
NAMES = ("Ana", "Ben", "Chidi", "Dora", "Emil", "Farah", "Gita", "Hugo", "Ines", "Jonas", "Kemal", "Lucia")


def everyday_chats() -> Iterator[Document]:
    """1,344 conversations of one question each, always the same; all of a topic fall into one split."""
    for topic in _topics():
        place = split_place(topic["topic"])
        for kind in KINDS:
            for number, question in enumerate(_questions(topic, kind)):
                messages = [{"role": "user", "content": question}]
                yield Document(f"{topic['topic']}/{kind}{number}", messages=messages, category=kind, place=place)


@cache
def _topics() -> list[dict[str, Any]]:
    text = files("distill.corpora.everyday").joinpath("topics.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def _questions(topic: dict[str, Any], kind: str) -> list[str]:
    """Three or four of a kind, by ways to ask that are drawn without repeating one."""
    rng = random.Random(f"{topic['topic']}:{kind}")  # of a string it is the same in every process
    ways = rng.sample(TEMPLATES[kind], 4 if kind in QUOTING else 3)
    asks = rng.sample(topic["asks"], len(topic["asks"]))
    drawn = [_drawn(rng, topic["text"]) | {"question": asks[number]} for number in range(len(ways))]
    return [way.format(**topic | one) for way, one in zip(ways, drawn, strict=True)]


def _drawn(rng: random.Random, text: str) -> dict[str, Any]:
    """Numbers and a name for an exercise, and the text with mistakes in it."""
    words = text.split(" ")
    for place in rng.sample(range(len(words)), 4):
        words[place] = _misspelt(words[place], rng)
    return {
        "name": rng.choice(NAMES),
        "price": rng.randint(3, 40),
        "count": rng.randint(3, 9),
        "days": rng.randint(4, 12),
        "percent": rng.choice((5, 10, 20, 25, 30)),
        "stock": rng.randint(120, 300),
        "mistaken": " ".join(words),
    }


def _misspelt(word: str, rng: random.Random) -> str:
    """The word with two of its inner letters changed over, where it has such."""
    if len(word) < 5 or not word.isalpha():
        return word
    place = rng.randint(1, len(word) - 3)
    return word[:place] + word[place + 1] + word[place] + word[place + 2 :]
