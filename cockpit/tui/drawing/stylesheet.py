"""A style sheet that parses each source once for a theme."""

from textual.css.stylesheet import Stylesheet


class KeptStylesheet(Stylesheet):
    """Textual parses every source again when a screen is opened for the first time, although only the theme changes the
    result. The sources here are fixed, so a source that was parsed with the same variables need not be parsed again."""

    def set_variables(self, variables: dict[str, str]) -> None:
        """Set the variables of the theme; if they have changed, discard all parsed sources."""
        if variables != self._variables:
            super().set_variables(variables)

    def reparse(self) -> None:
        """Parse the sources that have not been parsed with these variables."""
        self.parse()
