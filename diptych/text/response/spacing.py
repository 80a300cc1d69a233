"""White space beside what is taken out of a text: it belongs to the marks. Pure."""


class Spacing:
    """One part's text as it comes, without the white space that only kept marks apart.

    Space before the first word stays if nothing was taken out before it, space behind the
    last one if nothing was taken out behind it, and all that is between words.
    """

    def __init__(self) -> None:
        self._space: list[str] = []  # not said yet; joined once, however many pieces it comes in
        self._is_begun = False
        self._is_cut = False  # something was taken out since the last word

    def add(self, text: str) -> str:
        """What of ``text``, and of the space before, is certain to be said."""
        words = text.rstrip()
        if not words:
            self._space.append(text)
            return ""
        space, self._space = "".join(self._space), [text[len(words) :]]
        if not self._is_begun and self._is_cut:
            space, words = "", words.lstrip()
        self._is_begun, self._is_cut = True, False
        return space + words

    def cut(self) -> None:
        """Something is taken out here."""
        self._is_cut = True

    def end(self) -> str:
        """The rest."""
        space, self._space = "".join(self._space), []
        return "" if self._is_cut else space
