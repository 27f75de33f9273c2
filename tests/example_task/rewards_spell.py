"""The rewards of the spell task: plain functions of a completion's text and its example."""


def correct(text, example):
    return float(text == example.answer)


def letters(text, example):
    """The share of letters that stand in their right place."""
    right = sum(a == b for a, b in zip(text, example.answer, strict=False))
    return right / max(len(text), len(example.answer))
