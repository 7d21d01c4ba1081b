"""Text that others gave, as a terminal or a log may show it: names, notes, reasons, details, fingerprints, what a library says of them."""


def printable(text: str) -> str:
    """One line: whatever moves a cursor, changes a colour, turns the direction of writing or begins another line becomes `?`."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)


def printable_lines(text: str) -> str:
    """The same of a text whose line ends are ours."""
    return "\n".join(map(printable, text.split("\n")))
