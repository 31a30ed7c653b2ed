"""A Textual style sheet that parses each piece of CSS only once for each theme."""

from textual.css.stylesheet import Stylesheet


class KeptStylesheet(Stylesheet):
    """A style sheet that caches parsed CSS sources. Plain Textual parses all sources again when a screen is opened for
    the first time. This program's CSS does not change, so it is parsed again only if the theme's variables have
    changed."""

    def set_variables(self, variables: dict[str, str]) -> None:
        """Set the variables of the theme; if they have changed, discard all parsed sources."""
        if variables != self._variables:
            super().set_variables(variables)

    def reparse(self) -> None:
        """Parse only the sources that have not been parsed since the theme's variables last changed."""
        self.parse()
